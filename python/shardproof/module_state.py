"""What modules keep beside parameters and buffers, and the code of plain PyTorch that saves and loads a module's state."""

from __future__ import annotations

import contextlib
import io
import pickle
from typing import Any, Callable, Iterator

import torch
from torch import nn

from . import _C


def _extra(module: nn.Module) -> "Iterator[tuple[str, nn.Module, dict[str, Any]]]":
    """Of each module that saves more than its tensors: the prefix of its names, the module, and what it saves besides."""
    plain = nn.Module
    for name, part in module.named_modules(remove_duplicate=False):
        kind = type(part)
        if kind.get_extra_state is plain.get_extra_state and kind._save_to_state_dict is plain._save_to_state_dict:
            continue
        prefix, found = name and name + ".", {}
        part._save_to_state_dict(found, prefix, False)
        own = [value for value in (*part._parameters.values(), *part._buffers.values()) if value is not None]
        storages = {value.untyped_storage()._cdata for value in own}
        yield prefix, part, {
            key: value
            for key, value in found.items()
            if not (isinstance(value, torch.Tensor) and value.untyped_storage()._cdata in storages)
        }


def saved(module: nn.Module) -> "dict[str, bytes]":
    """The extra state of a module, as a checkpoint of PyTorch has it: by name, what torch.save writes."""
    entries = {}
    for _, _, extra in _extra(module):
        for name, value in extra.items():
            file = io.BytesIO()
            torch.save(value, file)
            entries[name] = file.getvalue()
    return entries


def reads(module: nn.Module, entries: "dict[str, bytes]") -> "Callable[[], None]":
    """Read such entries, and return what gives the module their values."""
    values = {}
    for name, entry in entries.items():
        try:
            values[name] = torch.load(io.BytesIO(entry), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise _C.Error(
                f"[checkpoint] the extra state '{name}' of a module holds objects of classes that a file may not make: "
                f"{str(error).splitlines()[0]} If you trust the file, name them by torch.serialization.add_safe_globals"
            ) from error

    def put() -> None:
        for prefix, part, extra in list(_extra(module)):
            given = {name: values[name] for name in extra if name in values}
            errors: "list[str]" = []
            if given:
                part._load_from_state_dict(given, prefix, {"version": part._version}, False, [], [], errors)
            if errors:
                raise _C.Error(f"[checkpoint] {type(part).__name__} did not take its extra state: {'; '.join(errors)}")

    return put


@contextlib.contextmanager
def with_tensors(
    module: nn.Module, replace: "Callable[[str, str, torch.Tensor], torch.Tensor | None]"
) -> "Iterator[list[tuple[dict, str, torch.Tensor, torch.Tensor]]]":
    """Within, modules have what `replace(kind, name, tensor)` gives in the place of their parameters and buffers.

    Yields the dict, the key, the old tensor and the new one of each that was replaced. None leaves a tensor as it is. A tensor
    that several modules share is replaced by one.
    """
    replaced, made = [], {}
    for prefix, part in module.named_modules():
        for kind in ("_parameters", "_buffers"):
            items = getattr(part, kind)
            for key, old in items.items():
                if old is None:
                    continue
                if id(old) not in made:
                    made[id(old)] = replace(kind, f"{prefix}.{key}" if prefix else key, old)
                if made[id(old)] is not None:
                    replaced.append((items, key, old, made[id(old)]))
    try:
        for items, key, _, new in replaced:
            items[key] = new
        yield replaced
    finally:
        for items, key, old, new in replaced:
            if key in items and items[key] is new:  # TorchScript has no get
                items[key] = old
