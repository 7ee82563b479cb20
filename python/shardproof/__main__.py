"""``python -m shardproof``: the command. Its options are described by ``python -m shardproof --help``."""

import os
import sys
import sysconfig


def command_path() -> str:
    """Where the program is: beside the package, or in the build folder that the package is in."""
    here = os.path.dirname(os.path.abspath(__file__))
    package = next((folder for folder in sys.path if os.path.isfile(os.path.join(folder, "shardproof", "__main__.py"))), here)
    candidates = [os.path.join(here, "bin", "shardproof"), os.path.join(package, os.pardir, "shardproof")]
    for path in candidates:
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return os.path.realpath(path)
    sys.exit(
        "shardproof: this installation has no command, because it was built without the libraries that the command needs "
        "(CLI11 and nlohmann-json). Install them and build the package again. There is no program at: " + ", ".join(candidates)
    )


if __name__ == "__main__":
    path = command_path()
    # The command opens Python for its second oracle and for --engine: that of this environment, if torch is there.
    if os.path.isdir(os.path.join(sysconfig.get_paths()["purelib"], "torch")):
        os.environ.setdefault("SHARDPROOF_VENV", sys.prefix)
    os.execv(path, [path, *sys.argv[1:]])
