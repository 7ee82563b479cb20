"""The Python that has torch, and an environment that lays the bundle's packages over it."""
import glob
import json
import os
import re
import shutil
import subprocess

from . import Trouble

# What a Python says about itself, without importing torch, which takes seconds.
ASK = """
import importlib.util, json, os, sys, sysconfig
v = sysconfig.get_config_var
spec = importlib.util.find_spec("torch")
sites = [p for p in sys.path if p and os.path.isdir(p) and any(n.endswith(".dist-info") for n in os.listdir(p))]
headers = os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h"))
embeds = headers and any(
    d and n and os.path.exists(os.path.join(d, n))
    for d in (v("LIBDIR"), v("LIBPL")) for n in (v("LDLIBRARY"), v("INSTSONAME")))
print(json.dumps({"version": "%d.%d" % sys.version_info[:2], "executable": sys.executable, "sites": sites, "embeds": embeds,
                  "headers": headers,
                  "torch": os.path.dirname(spec.origin) if spec and spec.origin else None}))
"""
# GPUs by the driver itself: importing torch takes longer than the first kernel may.
ASK_GPU = """
import ctypes, json
cuda, count, names, capabilities = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), [], set()
assert cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
for index in range(count.value):
    device, name, part = ctypes.c_int(), ctypes.create_string_buffer(100), (ctypes.c_int * 2)()
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, 100, device)
    for place, attribute in enumerate((75, 76)):  # major and minor number of the compute capability
        cuda.cuDeviceGetAttribute(ctypes.byref(part, 4 * place), attribute, device)
    names.append(name.value.decode())
    capabilities.add("%d%d" % tuple(part))
print(json.dumps({"names": names, "capabilities": sorted(capabilities)}))
"""


def ask(python, script, timeout=60):
    """What the script prints in that Python, as JSON; None if it does not run there."""
    try:
        done = subprocess.run([python, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                              timeout=timeout, check=False)
        return json.loads(done.stdout.strip().split("\n")[-1]) if done.returncode == 0 else None
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def torch_version(folder):
    try:
        with open(os.path.join(folder, "version.py"), encoding="utf-8") as file:
            return re.search(r"__version__ = '([^']+)'", file.read()).group(1)
    except (OSError, AttributeError):
        return ""


def minor_of(version):
    return ".".join(version.split(".")[:2])


def environments_below(top, depth=4):
    """Interpreters whose own packages hold torch, in folders a few levels below."""
    for folder, folders, _ in os.walk(top):
        level = folder[len(top):].count(os.sep)
        folders[:] = sorted(set(folders) - {"lib", "share", "include", "proc"}) if level < depth else []
        if glob.glob(os.path.join(glob.escape(folder), "lib", "python3.*", "site-packages", "torch", "version.py")):
            yield os.path.join(folder, "bin", "python3")


def candidates(root, environment):
    """Interpreters, those that are most likely meant first."""
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        if environment.get(variable):
            yield os.path.join(environment[variable], "bin", "python3")
    for folder in environment.get("PATH", "").split(os.pathsep):
        names = sorted(os.path.basename(path) for path in glob.glob(os.path.join(glob.escape(folder), "python3.*")))
        for name in ["python3", "python", *names]:
            if re.fullmatch(r"python(3(\.\d+)?)?", name):
                yield os.path.join(folder, name)
    yield os.path.join(root, ".venv", "bin", "python3")
    for top in ("/opt", "/usr/local", "/srv", os.path.expanduser("~")):
        yield from environments_below(top)


def torches():
    """The versions of torch that the tree builds with."""
    tree = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    with open(os.path.join(tree, "cmake", "LibTorch.cmake"), encoding="utf-8") as file:
        return re.search(r"set\(SHARDPROOF_TORCH_VERSIONS ([\d. ]+)\)", file.read()).group(1).split()


def find_python(root, environment, preferred=None):
    """Asks SHARDPROOF_PYTHON alone where it is set, else the candidates. Returns what the first with the preferred torch says,
    or else the first with a torch that the tree builds with."""
    given = environment.get("SHARDPROOF_PYTHON")
    seen, fit, others = set(), [], []
    for python in [given] if given else candidates(root, environment):
        if python in seen or not os.path.exists(python):
            continue
        seen.add(python)
        said = ask(python, ASK)
        if not said or not said["torch"]:
            continue
        version = torch_version(said["torch"])
        if minor_of(version) in torches():
            fit.append(dict(said, release=version))
            if preferred in (None, minor_of(version)):
                return fit[-1]
        else:
            others.append(f"{python} has torch {version or 'of no known version'}")
    if fit:
        return fit[0]
    where = f"SHARDPROOF_PYTHON={given}" if given else f"{len(seen)} interpreters"
    raise Trouble(f"no Python with torch {', '.join(torches())} among {where}{': ' if others else ''}{'; '.join(others)}. Name "
                  "one by SHARDPROOF_PYTHON=FILE")


def gpus(python):
    return ask(python, ASK_GPU) or {"names": [], "capabilities": []}


def lay_over(said, target):
    """An environment in which the packages of that Python are links, so that others can be laid over them."""
    shutil.rmtree(target, ignore_errors=True)
    done = subprocess.run([said["executable"], "-m", "venv", "--without-pip", "--symlinks", target], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise Trouble(f"{said['executable']} -m venv failed: {done.stdout.strip()}")
    packages = os.path.join(target, "lib", "python" + said["version"], "site-packages")
    for site in said["sites"]:
        for name in os.listdir(site):
            link = os.path.join(packages, name)
            if name != "__pycache__" and not os.path.lexists(link):
                os.symlink(os.path.join(site, name), link)
    return packages
