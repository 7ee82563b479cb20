"""Sharded training of any ``torch.nn.Module``, and a proof that it trains what the plain model trains.

>>> import shardproof
>>> def body(comm):                                   # a rank: a thread here, a process under torchrun or mpirun
...     sharded = shardproof.fully_shard(Net(), comm, strategy="zero3", units=[Block])
...     optimizer = shardproof.adamw(sharded, lr=1e-3)
>>> shardproof.run_threads(3, body)

The C++ library is opened when one of the names below is first used, so that ``shardproof.check``, which needs PyTorch alone,
works without it.
"""

import importlib as _importlib

__version__ = "0.1.0"

_HOMES = {
    "_C": ("BrokenInvariant", "Error", "FailedCheck", "NonFiniteError"),
    "check.runner": ("Report",),
    "check.verify": ("ProofFailed", "verify"),
    "checkpoint": ("Manager", "load", "load_weights", "save", "save_weights"),
    "ema": ("Ema",),
    "experts": ("RouterBiases", "balance_loss", "z_loss"),
    "fingerprint": ("FingerprintCheck",),
    "lora": ("Lora", "add_lora"),
    "optim": (
        "LossScaler",
        "Optimizer",
        "adam",
        "adamw",
        "lion",
        "muon",
        "sgd",
        "torch_optimizer",
        "warmup_constant",
        "warmup_cosine",
        "warmup_inverse_sqrt",
        "warmup_linear",
        "warmup_stable_decay",
    ),
    "parallel": (
        "ColumnInput",
        "ColumnParallel",
        "CutDropout",
        "ExpertParallel",
        "PartialGradients",
        "RowParallel",
        "ScatterOutput",
        "SequenceParallel",
        "TensorParallel",
        "VocabParallel",
        "WholeSequence",
        "fused_linear_cross_entropy",
        "parallelize",
        "vocab_parallel_cross_entropy",
    ),
    "ranks": ("Comm", "MeshComm", "comm_of", "run_mpi", "run_threads", "seeded"),
    "sharded": ("Piece", "Sharded", "UnitHandle", "sharded_of"),
    "sharding": ("fully_shard", "transfer"),
    "units": ("Dropout", "Precision", "Unit", "random_stream"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [*_HOME_OF, "check", "fsdp"]  # noqa: PLE0604


def _open_library():
    import torch  # loads the libraries that the extension module needs

    try:
        built_for = _importlib.import_module("._built_for", __name__).TORCH
        if not torch.__version__.startswith(built_for + "."):
            raise ImportError(f"it was built for torch {built_for}, and torch {torch.__version__} is installed")
        return _importlib.import_module("._C", __name__)
    except ImportError as error:
        raise ImportError(
            f"shardproof's C++ library cannot be opened: {error}. Install the package with `pip install .`, or put "
            "build/python on the path after `ci/build`"
        ) from error


def __getattr__(name):
    if name == "check":
        return _importlib.import_module(".check", __name__)
    if name == "fsdp":
        _open_library()
        return _importlib.import_module(".fsdp", __name__)
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'shardproof' has no attribute '{name}'")
    _open_library()
    value = getattr(_importlib.import_module("." + home, __name__), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted([*globals(), *__all__])
