"""DCP loads a checkpoint with a flipped bit, and says nothing."""

import os
import sys
import tempfile
import warnings

import torch
import torch.distributed.checkpoint as dcp

warnings.filterwarnings("ignore")


def main():
    saved = {"weight": torch.arange(1.0, 9.0)}
    with tempfile.TemporaryDirectory() as folder:
        dcp.save(saved, checkpoint_id=folder, no_dist=True)
        path = next(os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".distcp"))
        with open(path, "rb") as file:
            content = bytearray(file.read())
        at = content.find(saved["weight"].numpy().tobytes())
        content[at + 3] ^= 0x40  # an exponent bit of the first value
        with open(path, "wb") as file:
            file.write(content)
        loaded = {"weight": torch.zeros(8)}
        try:
            dcp.load(loaded, checkpoint_id=folder, no_dist=True)
        except Exception as error:  # noqa: BLE001
            print(f"refused: {type(error).__name__}: {error}")
            print("the finding does not hold")
            return 0
    print("saved ", saved["weight"].tolist())
    print("loaded", loaded["weight"].tolist())
    holds = not torch.equal(saved["weight"], loaded["weight"])
    print("the finding holds" if holds else "the finding does not hold")
    return int(holds)


if __name__ == "__main__":
    sys.exit(main())
