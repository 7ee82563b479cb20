"""Tensor and sequence parallelism of plain modules: `parallelize`, and the styles of its plan."""

from __future__ import annotations

import dataclasses
from typing import Any, Optional, Union

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from . import _C
from .experts import called_with
from .ranks import mesh_comm
from .sharded import sharded_of
from .sharding import mirrors
from .units import Dropout

Segments = "tuple[tuple[int, int, bool], ...]"


@dataclasses.dataclass(frozen=True)
class ColumnParallel:
    """Cut the rows of an nn.Linear by its outputs. As ColwiseParallel of torch.

    Attributes
    ----------
    gather_output : bool
        Whether the output is whole on every rank; otherwise it is split in its last dim.
    segments : tuple of (length, granule, copied)
        Of the rows, when they are more than one thing: granules, e.g. heads, stay together, and copied ones that are fewer
        than the ranks are held in copies.
    """

    gather_output: bool = False
    segments: Segments = ()  # type: ignore[valid-type]


@dataclasses.dataclass(frozen=True)
class RowParallel:
    """Cut an nn.Linear by its inputs. As RowwiseParallel of torch. The bias is added once, after the sum.

    Attributes
    ----------
    input_is_parallel : bool
        Whether the input is split in its last dim already; otherwise a whole one is cut first.
    segments : tuple of (length, granule, copied)
        Of the columns, as the outputs of the layer before are cut.
    """

    input_is_parallel: bool = True
    segments: Segments = ()  # type: ignore[valid-type]


@dataclasses.dataclass(frozen=True)
class VocabParallel:
    """Cut the rows of an nn.Embedding. Tokens are whole on every rank."""


@dataclasses.dataclass(frozen=True)
class SequenceParallel:
    """A module whose input is split along the sequence, e.g. a norm. Its parameters are whole, its gradients are summed."""


@dataclasses.dataclass(frozen=True)
class PartialGradients:
    """A module that computes on what a cut gave it, e.g. a norm of this rank's heads. Its gradients are summed."""


@dataclasses.dataclass(frozen=True)
class ScatterOutput:
    """A module that runs on what is whole; its output is then split along ``dim``, if the plan has a sequence_dim."""

    dim: int = 0


@dataclasses.dataclass(frozen=True)
class WholeSequence:
    """A module that is not cut and needs whole sequences, e.g. a layer of experts. Each rank computes the same.

    If the plan has a sequence_dim, the input is gathered along it, and the output is split again.
    """


@dataclasses.dataclass(frozen=True)
class ColumnInput:
    """What a column-parallel layer does to its input, for a module that uses a weight which is cut elsewhere."""


@dataclasses.dataclass(frozen=True)
class CutDropout:
    """A `Dropout` of what a column-parallel layer gives. It uses this rank's part of the mask of the whole tensor.

    Attributes
    ----------
    dim : int
        The dim that is cut.
    segments : tuple of (length, granule, copied)
        Of that dim, as the outputs of the layer are cut.
    """

    dim: int = -1
    segments: Segments = ()  # type: ignore[valid-type]


@dataclasses.dataclass(frozen=True)
class ExpertParallel:
    """A module that holds the experts of a layer, one behind the other along the first dim of each of its parameters.

    Its forward takes ``(x [tokens, n], experts [tokens, k], weights [tokens, k])`` and returns [tokens, n], as the experts
    of transformers do. Rows go to the ranks that hold their experts, where this forward runs on them with one expert each
    and a weight of 1, and back. An expert of -1 is nowhere: such a choice is no row and adds nothing. Where one rank has
    all of them whole, this forward gets the -1 itself. A field ``num_experts`` becomes the number of experts of this rank.
    ``fully_shard`` shards experts over the ranks that hold the same ones. A plan of this style alone, without
    ``cut_inside``, needs no axis.

    Attributes
    ----------
    ranks : int
        So many neighbours among the data-parallel ranks have different experts. The same in all of a model.
    cut_inside : bool
        Each rank along the plan's axis holds a slice of every expert, and these ranks sum what their slices give. For a module
        whose parameters are ``gate_up_proj`` [experts, 2 * intermediate, n], gate's rows before up's, and ``down_proj``
        [experts, n, intermediate], as in transformers. Its forward takes sizes from its parameters.
    """

    ranks: int = 1
    cut_inside: bool = False


Style = Union[
    ColumnParallel,
    RowParallel,
    VocabParallel,
    SequenceParallel,
    PartialGradients,
    ScatterOutput,
    WholeSequence,
    ColumnInput,
    CutDropout,
    ExpertParallel,
]


class TensorParallel:
    """A model that is cut along an axis. Made by `parallelize`."""

    def __init__(self, module: nn.Module, native: _C.TensorParallel, mirror: _C.Mirror):
        self.module = module
        self.native = native
        whole = {name: shape for name, shape, _ in native.parameters()}
        for prefix, part in module.named_modules():
            if isinstance(part, Dropout):
                part.__dict__["placed"] = _C.DropoutCall(mirror, part)
            call = _C.StyledCall(mirror, part)
            if not call.has_style:
                continue
            if call.shares_experts:
                first, own = next(part.named_parameters(prefix))
                count = whole[first][0]
                if getattr(part, "num_experts", None) == count:  # as experts of transformers count them
                    part.num_experts = len(own)
                part.forward = _shared(call, part, part.forward, count)
                continue
            adapted = part.__dict__.get("forward")
            if hasattr(adapted, "plain"):  # of an adapter, which is added to what the cut layer gives
                adapted.plain = _styled(call, adapted.plain, type(part).__name__)
            else:
                part.forward = _styled(call, part.forward, type(part).__name__)

    @torch.no_grad()
    def gather(self) -> "dict[str, torch.Tensor]":
        """Whole parameters by name, before the model is sharded as well. Collective."""
        return dict(self.native.gather_parameters())

    def parameters(self) -> "list[tuple[str, list[int], int]]":
        """Of what was cut, or has terms of a sum as its gradient: the name, the whole shape, and how many ranks have terms."""
        return self.native.parameters()


def _styled(call: _C.StyledCall, plain, kind: str):
    def forward(*args, **kwargs):
        if len(args) != 1 or kwargs or not isinstance(args[0], torch.Tensor):
            raise _C.Error(
                f"[tensor_parallel] a {kind} with a style takes one tensor, and was called with {len(args)} arguments and "
                f"{len(kwargs)} keywords. Give the style to its parts"
            )
        return call.run(plain, args[0])

    return forward


def _shared(call: _C.StyledCall, part: nn.Module, plain, count: int):
    def forward(*args, **kwargs):
        given = called_with(part, args, kwargs, in_order=True)
        if len(given) != 3:
            raise _C.Error(f"[tensor_parallel] experts that ranks share take (x, experts, weights), got {len(given)} arguments")
        x, experts, weights = given
        dispatch = call.dispatch(experts, count)
        rows, own = dispatch.rows(x), dispatch.experts().unsqueeze(1)
        if len(rows):
            outputs = plain(rows, own, torch.ones_like(own, dtype=rows.dtype))
        else:  # with a graph, for other ranks wait in their backwards for this one's
            outputs = rows + sum(parameter.sum() * 0 for parameter in part.parameters())
        return dispatch.sums(outputs, weights).to(x.dtype)

    return forward


def parallelize(
    module: nn.Module,
    comm: Any = None,
    mesh: Any = None,
    plan: Optional[dict] = None,
    *,
    axis: str = "tp",
    sequence_dim: Optional[int] = None,
    compare_replicas: bool = True,
    overlap_pieces: int = 1,
) -> TensorParallel:
    """Cut a model's layers over the ranks along one axis. Call it before `fully_shard`, with the same comm and mesh.

    Collective. A module's forward has to take sizes from its parameters and inputs (heads = width / head size), and not from
    the options of the whole model.

    Parameters
    ----------
    module : torch.nn.Module
        The model. Its parameters keep their identity.
    comm, mesh
        As in `fully_shard`; the mesh has the axis, unless all that the plan does is `ExpertParallel` of whole experts.
    plan : dict
        A pattern of module names -> a style. The first pattern that fits a module counts.
    axis : str
        Along which the model is cut.
    sequence_dim : int, optional
        Between parallel blocks activations are split along this dim.
    compare_replicas : bool
        Whether training compares gradients of parameters that are whole on every rank, in steps 1, 2, 4, 8 and so on.
    overlap_pieces : int
        Into how many pieces of the batch `ColumnParallel` and `RowParallel` layers cut their products, so that one piece is
        gathered or summed over the ranks while another is multiplied. A batch of one stays whole.

    Returns
    -------
    TensorParallel
        It has to live as long as the model computes on its cut.

    Examples
    --------
    >>> comms = shardproof.MeshComm(comm, "dp_shard=2,tp=2")
    >>> shardproof.parallelize(model, comms, plan={
    ...     "blocks.*.up": shardproof.ColumnParallel(), "blocks.*.down": shardproof.RowParallel()})
    >>> sharded = shardproof.fully_shard(model, comms, units=[Block])
    """
    if sharded_of(module) is not None:
        raise _C.Error("[tensor_parallel] this model is sharded already. Call parallelize before fully_shard")
    comms = mesh_comm(comm, mesh)
    mirror = _C.Mirror(module)
    native = _C.parallelize(mirror, comms, list((plan or {}).items()), axis, sequence_dim, compare_replicas, overlap_pieces)
    parallel = TensorParallel(module, native, mirror)
    mirrors[module] = mirror
    module.__dict__["_shardproof_parallel"] = parallel
    return parallel


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    entries: int,
    comms: _C.MeshComm,
    *,
    axis: str = "tp",
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    vocab: int = 0,
) -> torch.Tensor:
    """Cross entropy of logits whose last dim is cut over the ranks along an axis. The logits are never gathered.

    Parameters
    ----------
    logits : Tensor
        [.., own entries], of ``entries`` in all.
    targets : Tensor
        [..], in the whole numbering.
    entries : int
        Of the whole vocabulary, padding included.
    comms : MeshComm
        The mesh.
    reduction : {"mean", "sum"}
        As in torch.nn.functional.cross_entropy.
    label_smoothing, ignore_index
        As there.
    vocab : int
        Entries from here on are padding. 0: none is.
    """
    return _C.vocab_parallel_cross_entropy(
        logits, targets, entries, comms, axis, _is_mean(reduction), label_smoothing, ignore_index, vocab
    )


def fused_linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: Optional[torch.Tensor] = None,
    *,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    vocab: int = 0,
    logits_bytes_max: int = 128 << 20,
    comms: Optional[_C.MeshComm] = None,
    axis: str = "tp",
    entries: int = 0,
) -> torch.Tensor:
    """Cross entropy of the logits of a linear layer, which are made for some tokens at a time and never exist as a whole.

    The forward makes the gradients as well, unless under `torch.no_grad`. The result can be differentiated once.

    Parameters
    ----------
    hidden : Tensor
        [.., in].
    weight, bias : Tensor
        [entries, in] and [entries], as those of an nn.Linear, in the dtype of hidden or under autocast. Where they are
        parameters of a sharded model, call this in the forward of their module.
    targets : Tensor
        [..], int64. One outside of the vocabulary raises Error, or makes the loss NaN on a GPU.
    reduction : {"mean", "sum"}
        As in torch.nn.functional.cross_entropy.
    label_smoothing, ignore_index
        As there.
    vocab : int
        Entries from here on are padding. 0: none is.
    logits_bytes_max : int
        How many bytes logits and their gradient may take at a time. Those of one token always may.
    comms : MeshComm, optional
        Where weight and bias are this rank's part of ``entries`` entries, cut evenly along ``axis``: the mesh. hidden is
        whole there, and every rank calls this with the same ``logits_bytes_max``.

    Returns
    -------
    Tensor
        Of no dims, in float32, or in float64 where the inputs are.

    Examples
    --------
    >>> class Head(nn.Linear):
    ...     def forward(self, hidden, targets):
    ...         return shardproof.fused_linear_cross_entropy(hidden, self.weight, targets, self.bias)
    """
    for name, given in (("hidden", hidden), ("weight", weight), ("targets", targets), ("bias", bias)):
        if isinstance(given, DTensor):
            raise _C.Error(
                f"[fused_linear_cross_entropy] {name} is a DTensor, and must be a plain tensor. A parameter of a sharded model "
                "is one in the forward of its module: call this there"
            )
    if comms is None and entries:
        raise _C.Error(
            f"[fused_linear_cross_entropy] entries={entries} without comms: they say how a vocabulary is cut over ranks. Give "
            "both, or neither where weight has all entries"
        )
    means = _is_mean(reduction)
    return _C.fused_linear_cross_entropy(
        hidden, weight, bias, targets, means, label_smoothing, ignore_index, vocab, logits_bytes_max, comms, axis, entries
    )


def _is_mean(reduction: str) -> bool:
    if reduction not in ("mean", "sum"):
        raise _C.Error(f"[cross_entropy] reduction must be 'mean' or 'sum', got {reduction!r}")
    return reduction == "mean"
