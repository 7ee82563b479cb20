"""Adapters of low rank (LoRA): small layers beside frozen ones, which alone are trained."""

from __future__ import annotations

import dataclasses
import math
import zlib
from typing import Any, Callable, Optional, Sequence, Union

import torch
from torch import nn

from . import _C
from .parallel import ColumnParallel, CutDropout, PartialGradients, RowParallel, SequenceParallel, Style
from .sharded import Sharded, sharded_of
from .units import Dropout


class Lora:
    """The adapters of a model. Made by `add_lora`.

    Attributes
    ----------
    layers : list of str
        The names of the layers that have adapters.
    rank : int
        Of the adapters.
    alpha : float
        The outputs of adapters are multiplied by ``alpha / rank``.
    dropout : float
        Of the inputs of adapters while the model trains.
    """

    def __init__(self, inputs: "dict[str, int]", rank: int, alpha: float, dropout: float):
        self.layers, self.rank, self.alpha, self.dropout = list(inputs), rank, alpha, dropout
        self._inputs = inputs  # how many features each layer takes
        self.native = _C.Lora(self.layers, rank, alpha, dropout)

    @property
    def scale(self) -> float:
        """What multiplies the output of an adapter."""
        return self.native.scale

    def with_styles(self, plan: "dict[str, Style]") -> "dict[str, Style]":
        """The plan of `parallelize` with styles for the adapters, so that they are cut as their layers are.

        Masks of dropout are then those of the model that is not cut.
        """
        added: "dict[str, Style]" = {}
        for layer in self.layers:
            style = next((style for pattern, style in plan.items() if _C.name_matches(pattern, layer)), None)
            if self.dropout > 0 and isinstance(style, ColumnParallel):
                added[layer + ".lora_dropout"] = SequenceParallel()
            elif self.dropout > 0 and isinstance(style, RowParallel) and style.input_is_parallel:
                added[layer + ".lora_dropout"] = CutDropout(segments=style.segments or ((self._inputs[layer], 1, False),))
            if isinstance(style, ColumnParallel):
                added[layer + ".lora_A"], added[layer + ".lora_B"] = SequenceParallel(), style
            elif isinstance(style, RowParallel):
                added[layer + ".lora_A"], added[layer + ".lora_B"] = style, SequenceParallel()
            elif not (style is None or isinstance(style, (SequenceParallel, PartialGradients))):
                raise _C.Error(f"[lora] layer '{layer}' has an adapter, and a style that is not one of a linear layer")
        return {**added, **plan}

    def merge(self, sharded: Sharded) -> None:
        """Add what each adapter computes to the weight of its layer, and make the adapter compute zero. Collective.

        A weight with another user, as that of a tied head has, is an error, and nothing is merged.
        """
        self.native.merge(sharded.native)
        sharded._note_published()

    def save(
        self,
        directory: str,
        sharded: Sharded,
        *,
        base_model: str = "",
        module_prefix: str = "",
        fan_in_fan_out: bool = False,
        overwrite: bool = False,
    ) -> None:
        """Save the adapters alone, in the files of PEFT: adapter_config.json and adapter_model.safetensors. Collective.

        After `merge` the adapters are zero, and until they are trained again this is an error. So it is in a run that loaded a
        checkpoint from after the merge.

        Parameters
        ----------
        directory : str
            Where to.
        sharded : Sharded
            The model.
        base_model : str
            What ``peft.PeftModel.from_pretrained`` takes as the base: a name or a path.
        module_prefix : str
            Of the layers' names in that model, e.g. "transformer.".
        fan_in_fan_out : bool
            Whether that model keeps its weights as inputs x outputs.
        overwrite : bool
            Replace a directory that exists; otherwise it is an error.
        """
        self.native.save(str(directory), sharded.native, base_model, module_prefix, fan_in_fan_out, overwrite)

    def load(self, directory: str, sharded: Sharded, *, module_prefix: str = "") -> None:
        """Load adapters that `save` or PEFT saved. Collective.

        Rank, alpha and layers must be those of this model; what does not fit, or is no plain LoRA, is an error on every rank.
        So are adapters that were merged into the weights of this model, which would then have them twice.
        """
        self.native.load(str(directory), sharded.native, module_prefix)
        sharded._note_published()


@dataclasses.dataclass(eq=False)
class Adapted:
    """The forward of a layer with an adapter: W x + scale * B (A x). Where there is dropout, A gets what that leaves of x."""

    layer: nn.Linear
    scale: float
    plain: Callable

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        own = input.view_as(input)  # the gradients of both are added first, whatever else uses the input
        output = self.plain(own)
        kept = self.layer.lora_dropout(own) if hasattr(self.layer, "lora_dropout") else own
        return output + self.layer.lora_B(self.layer.lora_A(kept)) * self.scale


def _uniform(weight: torch.Tensor, seed: int, name: str) -> None:
    generator = torch.Generator().manual_seed((seed << 32) + zlib.crc32(name.encode()))
    bound = 1 / math.sqrt(max(1, weight.shape[1]))
    weight.copy_(torch.rand(weight.shape, generator=generator) * (2 * bound) - bound)


@torch.no_grad()
def add_lora(
    module: nn.Module,
    targets: Union[str, Sequence[str]],
    *,
    rank: int = 8,
    alpha: Optional[float] = None,
    seed: int = 0,
    dropout: float = 0.0,
) -> Lora:
    """Give linear layers adapters of low rank, and freeze all parameters that there are. Only the adapters train.

    A layer computes ``W x + alpha / rank * B (A x)``, where A ("lora_A") and B ("lora_B") are layers below it. B begins as
    zero, so that the model computes at first what it computed. Call it on every rank, before `parallelize` and `fully_shard`.

    Parameters
    ----------
    module : torch.nn.Module
        The model.
    targets : str or sequence of str
        Patterns of the names of ``torch.nn.Linear`` layers.
    rank : int
        Of the adapters.
    alpha : float, optional
        Twice the rank without it.
    seed : int
        Of the first values of A.
    dropout : float
        The probability of zero in the input of A while the model trains. Masks are those of `Dropout`.

    Returns
    -------
    Lora
        For styles, merging, saving and loading.

    Examples
    --------
    >>> lora = shardproof.add_lora(model, "blocks.*.up", rank=8)
    >>> sharded = shardproof.fully_shard(model, comm, strategy="zero3")
    >>> lora.save("run/adapters", sharded, base_model="my-base")
    """
    if sharded_of(module) is not None or "_shardproof_parallel" in module.__dict__:
        raise _C.Error("[lora] this model is sharded or parallel already. Call add_lora before parallelize and fully_shard")
    if rank < 1:
        raise _C.Error(f"[lora] the rank must be at least 1, got {rank}")
    if not 0 <= dropout < 1:
        raise _C.Error(f"[lora] the dropout must be at least 0 and below 1, got {dropout}")
    alpha = float(2 * rank if alpha is None else alpha)
    patterns = [targets] if isinstance(targets, str) else list(targets)
    linear = {name: each for name, each in module.named_modules() if type(each) is nn.Linear}
    linear = {name: each for name, each in linear.items() if not name.endswith((".lora_A", ".lora_B"))}
    for pattern in patterns:
        if not any(_C.name_matches(pattern, name) for name in linear):
            raise _C.Error(f"[lora] target '{pattern}' fits no torch.nn.Linear of {type(module).__name__}")
    chosen = {name: each for name, each in linear.items() if any(_C.name_matches(pattern, name) for pattern in patterns)}
    for name, layer in chosen.items():
        if isinstance(layer.__dict__.get("forward"), Adapted):
            raise _C.Error(f"[lora] layer '{name}' has an adapter already")
        if layer.weight.is_meta:
            raise _C.Error(f"[lora] layer '{name}' is on the meta device; give adapters to a model that has memory")
    module.requires_grad_(False)
    for name, layer in chosen.items():
        made: "dict[str, Any]" = {"bias": False, "device": layer.weight.device, "dtype": layer.weight.dtype}
        layer.lora_A = nn.utils.skip_init(nn.Linear, layer.in_features, rank, **made)
        layer.lora_B = nn.utils.skip_init(nn.Linear, rank, layer.out_features, **made)
        _uniform(layer.lora_A.weight, seed, name)
        layer.lora_B.weight.zero_()
        if dropout > 0:
            layer.lora_dropout = Dropout(dropout)
        layer.forward = Adapted(layer, alpha / rank, layer.forward)
    return Lora({name: layer.in_features for name, layer in chosen.items()}, rank, alpha, dropout)
