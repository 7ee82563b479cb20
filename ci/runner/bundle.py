"""Unpacks the archive of ci/bundle: wheels into an environment, libraries for the tests into a prefix."""
import glob
import hashlib
import json
import os
import re
import shutil
import tarfile
import zipfile

from . import Trouble

FOLDER = "shardproof-bundle"


def unpack(archive, target):
    """Unpacks once. The mark beside it is the archive's SHA-256, so another archive replaces what is there."""
    try:
        with open(archive, "rb") as file:
            mark = hashlib.sha256(file.read()).hexdigest()
    except OSError as error:
        raise Trouble(f"cannot read the bundle {archive}: {error.strerror}. ci/bundle writes one") from error
    stamp = os.path.join(target, "unpacked")
    if not os.path.exists(stamp) or read(stamp) != mark:
        shutil.rmtree(target, ignore_errors=True)
        os.makedirs(target)
        try:
            with tarfile.open(archive) as tar:
                tar.extractall(target, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
        except (tarfile.TarError, EOFError, OSError) as error:
            raise Trouble(f"{archive} is no bundle, or a damaged one: {error}. ci/bundle writes one") from error
        if not os.path.exists(os.path.join(target, FOLDER, "bundle.json")):
            raise Trouble(f"{archive} has no {FOLDER}/bundle.json, so ci/bundle did not write it")
        with open(stamp, "w", encoding="utf-8") as file:
            file.write(mark)
    return os.path.join(target, FOLDER)


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def normalized(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def serves(wheel, python):
    """Whether the tags of a wheel's name fit that version of Python."""
    *_, tag, abi, _ = wheel[:-len(".whl")].split("-")
    if abi in ("none", "abi3"):
        least = re.fullmatch(r"cp3(\d+)", tag)
        return least is None or int(least.group(1)) <= int(python.split(".")[1])
    return "cp" + python.replace(".", "") in tag.split(".")


def remove_package(packages, name):
    """Removes what an environment has of a package, which may be links."""
    for info in glob.glob(os.path.join(glob.escape(packages), "*.dist-info")):
        if normalized(os.path.basename(info).split("-")[0]) != normalized(name):
            continue
        record = os.path.join(info, "RECORD")
        tops = {os.path.basename(info)}
        if os.path.exists(record):
            tops |= {line.split(",")[0].strip('"').split("/")[0] for line in read(record).splitlines()}
        for top in tops - {"", "..", "__pycache__"}:
            path = os.path.join(packages, top)
            if os.path.islink(path) or os.path.isfile(path):
                os.unlink(path)
            elif os.path.isdir(path):
                shutil.rmtree(path)


def install_wheels(bundle, packages, python):
    """Lays the bundle's wheels over an environment. Returns their number and the names of those for another Python."""
    unfit = []
    wheels = sorted(os.listdir(os.path.join(bundle, "wheels")))
    for wheel in wheels:
        if not serves(wheel, python):
            unfit.append(wheel.split("-")[0])
            continue
        remove_package(packages, wheel.split("-")[0])
        with zipfile.ZipFile(os.path.join(bundle, "wheels", wheel)) as archive:
            archive.extractall(packages)
    return len(wheels) - len(unfit), unfit


def contents(bundle):
    return json.loads(read(os.path.join(bundle, "bundle.json")))
