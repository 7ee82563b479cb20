"""Unpacks the archives of ci/bundle and ci/prebuilt, and lays wheels over an environment."""
import glob
import hashlib
import json
import lzma
import os
import re
import shutil
import tarfile
import zipfile

from . import Trouble


def folder_of(kind):
    """The one folder of an archive. Its file KIND.json says what it holds."""
    return "shardproof-" + kind


def unpack(archive, target, kind):
    """Unpacks once. The mark beside it is the archive's SHA-256, so another archive replaces what is there."""
    try:
        with open(archive, "rb") as file:
            mark = hashlib.sha256(file.read()).hexdigest()
    except OSError as error:
        raise Trouble(f"cannot read {archive}: {error.strerror}. ci/{kind} writes one") from error
    stamp = os.path.join(target, "unpacked")
    if not os.path.exists(stamp) or read(stamp) != mark:
        shutil.rmtree(target, ignore_errors=True)
        os.makedirs(target)
        try:
            with tarfile.open(archive) as tar:
                tar.extractall(target, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
        except (tarfile.TarError, EOFError, OSError, lzma.LZMAError) as error:
            raise Trouble(f"{archive} is no {kind}, or a damaged one: {error}. ci/{kind} writes one") from error
        if not os.path.exists(os.path.join(target, folder_of(kind), kind + ".json")):
            raise Trouble(f"{archive} has no {folder_of(kind)}/{kind}.json, so ci/{kind} did not write it")
        with open(stamp, "w", encoding="utf-8") as file:
            file.write(mark)
    return os.path.join(target, folder_of(kind))


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


def install_wheels(folder, packages, python):
    """Lays the wheels of an archive over an environment. Returns their number and the names of those for another Python."""
    unfit = []
    wheels = sorted(os.listdir(os.path.join(folder, "wheels")))
    for wheel in wheels:
        if not serves(wheel, python):
            unfit.append(wheel.split("-")[0])
            continue
        remove_package(packages, wheel.split("-")[0])
        with zipfile.ZipFile(os.path.join(folder, "wheels", wheel)) as archive:
            archive.extractall(packages)
    return len(wheels) - len(unfit), unfit


def contents(folder, kind):
    return json.loads(read(os.path.join(folder, kind + ".json")))
