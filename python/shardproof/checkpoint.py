"""Checkpoints that any mesh and strategy loads, and that torch.distributed.checkpoint opens."""

from __future__ import annotations

from typing import Any, Callable, Optional, Union

import torch
from torch import nn

from . import _C
from .optim import LossScaler, Optimizer
from .sharded import Sharded, sharded_of
from .torch_state import TorchState


AnyOptimizer = Union[Optimizer, torch.optim.Optimizer]


def _sharded(model: "Union[Sharded, nn.Module]") -> Sharded:
    if isinstance(model, Sharded):
        return model
    found = sharded_of(model) if isinstance(model, nn.Module) else None
    if found is None and hasattr(model, "_shardproof_handle"):
        found = model._shardproof_handle()
    if found is None or found.module is not model:
        raise _C.Error(
            f"[checkpoint] expected a sharded model, got a {type(model).__name__}. Give what shardproof.fully_shard returned; "
            "after shardproof.fsdp.fully_shard, give the outermost module"
        )
    return found


def _on_shards(sharded: Sharded, optimizer: Optional[AnyOptimizer]) -> Optional[TorchState]:
    """What is known of an optimizer of torch.optim; None of the library's own."""
    if optimizer is None or isinstance(optimizer, Optimizer):
        return None
    if sharded.shards is not None:
        return sharded.shards.state_of(optimizer)
    found = getattr(optimizer, "torch_state", None)
    if not isinstance(found, TorchState):
        raise _C.Error(
            f"[checkpoint] expected an optimizer on shards, got a {type(optimizer).__name__}. Make it by shardproof.adamw or "
            "the like, or by shardproof.torch_optimizer"
        )
    return found


def _for_save(sharded: Sharded, optimizer: Optional[AnyOptimizer]) -> Optional[_C.OptimizerState]:
    state = _on_shards(sharded, optimizer)
    return state.for_save() if state is not None else optimizer and optimizer.native


def _load(model: "Union[Sharded, nn.Module]", run: "Callable[..., Any]", optimizer: Optional[AnyOptimizer]) -> Any:
    sharded = _sharded(model)
    sharded._publish()
    state = _on_shards(sharded, optimizer)
    target = state.for_load() if state is not None else optimizer and optimizer.native
    loaded = run(sharded.native, target)
    sharded._note_published()
    if loaded is not None and state is not None:
        state.take(target)
    return loaded


def save(
    directory: str,
    sharded: "Union[Sharded, nn.Module]",
    optimizer: Optional[AnyOptimizer] = None,
    *,
    step: int = 0,
    values: Optional[dict] = None,
    of_rank: Optional[dict] = None,
    scaler: Optional[LossScaler] = None,
    overwrite: bool = False,
) -> None:
    """Save a checkpoint, whole and durable or not at all. Collective.

    Its names are those of FSDP2's ``get_state_dict``, and ``torch.distributed.checkpoint`` reads it.

    Parameters
    ----------
    directory : str
        Where to, on a file system that all ranks see.
    sharded : Sharded or torch.nn.Module
        The model; after `shardproof.fsdp.fully_shard`, its outermost module.
    optimizer : Optimizer or torch.optim.Optimizer, optional
        Its optimizer: one of the library's, or one of torch.optim that `torch_optimizer` or `shardproof.fsdp` made.
    step : int
        The caller's count of steps.
    values : dict, optional
        Whatever else is the same on every rank: numbers, texts, lists and dicts. Those of rank 0 are saved.
    of_rank : dict, optional
        This rank's own.
    scaler : LossScaler, optional
        A loss scaler.
    overwrite : bool
        Replace a directory that exists; otherwise it is an error.
    """
    model = _sharded(sharded)
    model._publish()
    _C.save(str(directory), model.native, _for_save(model, optimizer), step, values or {}, of_rank or {}, scaler, overwrite)


def load(
    directory: str,
    sharded: "Union[Sharded, nn.Module]",
    optimizer: Optional[AnyOptimizer] = None,
    *,
    scaler: Optional[LossScaler] = None,
    partial: bool = False,
) -> "dict[str, Any]":
    """Load a checkpoint, which may have been saved on another mesh, under another strategy, or by FSDP2. Collective.

    Parameters
    ----------
    directory : str
        The checkpoint.
    sharded, optimizer, scaler
        What to fill. An optimizer of torch.optim also takes its learning rates and other settings from the checkpoint, as
        its own ``load_state_dict`` does; the library's own keep those that they were made with. A scaler that the checkpoint
        has no state of counts as what does not fit.
    partial : bool
        Load what fits, and list the rest under "skipped".

    Returns
    -------
    dict
        "step", "values", "of_rank" and "skipped".
    """
    return _load(sharded, lambda native, state: _C.load(str(directory), native, state, scaler, partial), optimizer)


def load_weights(
    path: str, sharded: Sharded, *, family: str = "", entry: str = "", prefix: str = "", partial: bool = False
) -> "dict[str, Any]":
    """Load weights of another program straight into the shards: each rank reads the elements that it holds. Collective.

    Names, shapes and what describes the files are checked before anything changes. When a read fails later, the model has some
    of the file's values; the error says so, and another load mends it.

    Parameters
    ----------
    path : str
        A ``.safetensors`` file, a file of ``torch.save`` with a dict of tensors, the index of several of either, or a folder
        with ``model.safetensors`` or ``pytorch_model.bin``. Of a pickle nothing is run; what is no tensor is an error.
    sharded : Sharded
        The model. It may have been made on the device meta.
    family : str
        "": the file has the model's own names, as one of ``transformers`` has for the package's module. For a module with the
        names of shardproof's C++ models: gpt2, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, dots1, glm4_moe or
        deepseek_v3. Queries, keys and values may be fused in the file and separate in the model, or the reverse, and likewise
        gates. A file may have experts one by one, as hub files do; those of Mixtral need the family.
    entry : str
        Of a file of ``torch.save``: the key of the dict with the weights, such as "model" or "state_dict".
    prefix : str
        What stands before every name in the file, such as "module." of DDP or "_orig_mod." of ``torch.compile``.
    partial : bool
        Load what fits.

    Returns
    -------
    dict
        "missing" and "unused", lists of names, and "bytes_read", of weights by this rank. A file without adapters may be
        loaded into a model that has them: they stay as they are, and are among the missing.
    """
    loaded = _C.load_weights(str(path), sharded.native, family, entry, prefix, partial)
    sharded._note_published()
    return loaded


def save_weights(
    folder: str,
    sharded: Sharded,
    *,
    family: str = "",
    dtype: "torch.dtype | str" = "float32",
    projections: str = "family",
    config: Any = None,
    file_bytes_max: int = 5 << 30,
    overwrite: bool = False,
) -> None:
    """Save the main parameters as a folder with ``model.safetensors``, whole and durable or not at all. Collective.

    With ``config`` the folder is one that ``from_pretrained`` of ``transformers`` opens.

    Parameters
    ----------
    folder : str
        Where to, on a file system that rank 0 sees.
    sharded : Sharded
        The model.
    family : str
        As in `load_weights`.
    dtype : torch.dtype or str
        What values are rounded to.
    projections : str
        "family", or "fused" or "separate" queries, keys and values, and gates.
    config : optional
        The text of ``config.json``, or what has ``to_json_string()``, as ``model.config`` of ``transformers`` has.
    file_bytes_max : int
        Weights of more bytes become several files and their index.
    overwrite : bool
        Replace a folder that exists; otherwise it is an error.
    """
    text = config.to_json_string() if hasattr(config, "to_json_string") else (config or "")
    name = str(dtype).removeprefix("torch.")
    _C.save_weights(str(folder), sharded.native, family, name, projections, text, file_bytes_max, overwrite)


class Manager:
    """The checkpoints of one run: DIRECTORY/step_N, saved in the background if asked, the last few kept.

    One run saves in a directory. A second one that begins to save there gets an Error, which names the first, until that is
    gone. Any number of programs may load meanwhile; that changes nothing in the directory.

    Parameters
    ----------
    directory : str
        Where the checkpoints are.
    keep : int
        How many are kept. 0: all.
    in_background : bool
        Whether `save` returns when the values are copied.
    copy_in_background : bool
        Whether a save in the background copies the values beside the next forward and backward, too. The optimizer's step and
        all calls of this package that change values wait for the copy. Before other code writes to parameters or to the
        optimizer's state, call `Sharded.main_parameters_will_change`; without it the save fails.
    overwrite : bool
        Whether a step that is there already is replaced.
    """

    def __init__(
        self,
        directory: str,
        *,
        keep: int = 0,
        in_background: bool = False,
        copy_in_background: bool = False,
        overwrite: bool = False,
    ):
        self.native = _C.Manager(str(directory), keep, in_background, copy_in_background, overwrite)

    def save(
        self,
        sharded: "Union[Sharded, nn.Module]",
        optimizer: Optional[AnyOptimizer],
        step: int,
        *,
        values: Optional[dict] = None,
        of_rank: Optional[dict] = None,
        scaler: Optional[LossScaler] = None,
    ) -> bool:
        """Save step_N. False when it was refused because the save before is still being written. Collective."""
        model = _sharded(sharded)
        model._publish()
        return self.native.save(model.native, _for_save(model, optimizer), step, values or {}, of_rank or {}, scaler)

    def poll(self) -> bool:
        """Commit the save under way if all ranks have written it. True when none is under way. Collective."""
        return self.native.poll()

    def wait(self) -> None:
        """Commit the save under way, waiting for it. Collective."""
        self.native.wait()

    def load_latest(
        self,
        sharded: "Union[Sharded, nn.Module]",
        optimizer: Optional[AnyOptimizer] = None,
        *,
        scaler: Optional[LossScaler] = None,
        partial: bool = False,
    ) -> "Optional[dict[str, Any]]":
        """Load the last checkpoint that was committed, as `load` does. None when there is none. Collective."""
        return _load(sharded, lambda native, state: self.native.load_latest(native, state, scaler, partial), optimizer)

    def steps(self) -> "list[int]":
        """What is committed."""
        return self.native.steps()

    def latest(self) -> Optional[int]:
        """The last step that is committed."""
        return self.native.latest()
