"""Tells pip which torch the package depends on: the one of the environment, which the package is built against.

pip asks before it downloads what a package depends on, so a torch that the package cannot be built with is said at once. The
version names the torch as well, so that the wheels for several of them lie in one folder.
"""

import os
import re
import sys
from glob import glob

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def read(path, pattern):
    with open(path, encoding="utf-8") as file:
        return re.search(pattern, file.read(), re.MULTILINE).group(1)


def dynamic_metadata(field, settings=None, project=None):
    """What scikit-build-core calls. Under pip `sys.prefix` is the environment even where the build is isolated."""
    supported = read(os.path.join(ROOT, "cmake/LibTorch.cmake"), r"set\(SHARDPROOF_TORCH_VERSIONS ([\d. ]+)\)").split()
    files = glob(sys.prefix + "/lib/python3.*/site-packages/torch/version.py")
    found = read(files[0], r"^__version__ = '([^']+)'") if files else "none"
    minor = ".".join(found.split(".")[:2])
    if minor not in supported:
        raise RuntimeError(
            f"shardproof is built against the torch of the environment, which has to be one of {', '.join(supported)}. "
            f"{sys.prefix} has {found}. Install one of them first, e.g. pip install 'torch=={supported[0]}.*'"
        )
    if field == "dependencies":
        return [f"torch=={minor}.*"]
    version = read(os.path.join(ROOT, "impl/include/shardproof/version.h"), r'#define SHARDPROOF_VERSION "([\d.]+)"')
    return f"{version}+torch{minor}"
