"""Takes the archive of ci/prebuilt: unpacks it, and says whether it runs here with this machine's torch."""
import os
import subprocess

from . import Trouble, archives, environment

KIND = "prebuilt"
FOLDER = archives.folder_of(KIND)


def link(target, name):
    if os.path.islink(name):
        os.unlink(name)
    os.symlink(target, name)


def why_not(folder, said):
    """Why what was unpacked does not run with that Python and its torch; None if it does."""
    contents = archives.contents(folder, KIND)
    built_for = contents.get("torch", "of no known version")  # an older ci/prebuilt did not say
    if environment.minor_of(said["release"]) != built_for:
        return f"it was built with torch {built_for}, and this Python has {said['release']}"
    if said["version"] not in contents["pythons"]:
        return f"it has no modules for Python {said['version']}, only for {', '.join(contents['pythons'])}"
    # All symbols at once, so that another build of that torch shows now.
    variables = dict(os.environ, LD_BIND_NOW="1")
    try:
        done = subprocess.run([os.path.join(folder, "shardproof"), "--version"], stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, env=variables, check=False)
    except OSError as error:
        return error.strerror
    said_last = (done.stdout.strip().split("\n") or [""])[-1]
    return None if done.returncode == 0 else f"exit code {done.returncode}: {said_last.replace(folder + os.sep, '')[:300]}"


def torch_of(archive, target):
    """The torch that an archive was built with. None where it does not say, or cannot be read, which `take` tells."""
    try:
        return archives.contents(archives.unpack(archive, target, KIND), KIND).get("torch")
    except Trouble:
        return None


def take(archive, target, root, said):
    """The folder with the programs and None, or None and why it is not used. `said`: what the Python with torch says."""
    try:
        folder = archives.unpack(archive, target, KIND)
    except Trouble as trouble:
        return None, " ".join(str(trouble).split())  # tarfile says several lines
    link(os.path.dirname(said["torch"]), os.path.join(folder, "packages"))
    link(root, os.path.join(folder, "source"))
    reason = why_not(folder, said)
    return (None, reason) if reason else (folder, None)


def lay_tests(folder, root, python):
    """Writes the tests for ctest, with the places that they have here."""
    with open(os.path.join(folder, "tests.cmake"), encoding="utf-8") as file:
        text = file.read()
    for word, place in (("@BUILD@", folder), ("@SOURCE@", root), ("@PYTHON@", python)):
        text = text.replace(word, place)
    with open(os.path.join(folder, "CTestTestfile.cmake"), "w", encoding="utf-8") as file:
        file.write(text)


def tree_of(folder):
    return archives.contents(folder, KIND)["tree"]
