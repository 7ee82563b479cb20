"""Writes a counterexample as a script of plain PyTorch, which shows it without this package."""

from __future__ import annotations

import inspect
import textwrap

from .judge import FACTOR
from .verdict import Verdict
from .draw import Draw
from .plan import OPTIMIZERS, Plan, Subject, draw_plan
from .source import sources
from .train import Sharded

HEAD = '''"""{title}

{message}

Found by shardproof.check as: {line}
The script needs PyTorch only. It ends with 0 if the sharded run agrees with the plain one.
"""

from __future__ import annotations

{imports}

SEGMENTS = {segments}
OPTIONS = {options}  # of each segment
DTYPE = {dtype}
SAMPLES = {samples}


class Draw:
    """The sizes of the model that was found."""

    values = {values}

    def integer(self, name, low, high):
        return low + self.values.get(name, 0)

    def choice(self, name, options):
        return options[self.values.get(name, 0)]

    def flag(self, name):
        return bool(self.values.get(name, 0))


draw = Draw()

'''

TRAINING = '''
def base_model():
    torch.manual_seed({data})
    model = {make_model}.to(DTYPE)
    parameters = list(model.parameters())
    for i, parameter in enumerate(parameters):
        if {frozen} >> (i % 3) & 1 and i + 1 < len(parameters):
            parameter.requires_grad_(False)
    return model


def batch(s, t, m, pieces, dtype):
    """The pieces of one microbatch, one for each data-parallel rank."""
    generator = torch.Generator().manual_seed((({data} * 5 + s) * 5 + t) * 5 + m)
    tensors = {make_batch}
    tensors = [x.to(dtype) if x.is_floating_point() else x for x in tensors]
    return list(zip(*(x.split(SAMPLES) for x in tensors)))


def optimizer_of(parameters, wrap=None):
    parameters = [p for p in parameters if p.requires_grad]
    return wrap(parameters, {optimizer}) if wrap else {optimizer_call}


def train_plain(dtype):
    """The plain model on the samples of all ranks."""
    model = base_model().to(dtype)
    optimizer = optimizer_of(model.parameters())
    seen = {{}}
    for s, (mesh, steps) in enumerate(SEGMENTS):
        pieces = math.prod(size for axis, size in mesh.items() if axis.startswith("dp"))
        for t, (microbatches, every, clip) in enumerate(steps):
            for m in range(microbatches):
                for inputs, targets in batch(s, t, m, pieces, dtype):
                    (loss(model(inputs), targets) / pieces / microbatches).backward()
            for name, p in model.named_parameters():
                seen[f"segment {{s}} step {{t}}: gradient {{name}}"] = torch.zeros_like(p) if p.grad is None else p.grad.clone()
            if clip:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), *clip, foreach=False)
                seen[f"segment {{s}} step {{t}}: norm"] = norm
            optimizer.step()
            optimizer.zero_grad()
            for name, p in model.named_parameters():
                seen[f"segment {{s}} step {{t}}: parameter {{name}}"] = p.detach().clone()
    return seen


def whole(tensor):
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach().clone()


def train_rank(rank, s, folder):
    mesh, steps = SEGMENTS[s]
    dist.init_process_group("gloo", init_method=f"file://{{folder}}/store{{s}}", rank=rank, world_size=math.prod(mesh.values()),
                            timeout=timedelta(seconds=30))
    mesh = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    model = base_model()
{spoil}    module = parallelize_call(model, mesh, OPTIONS[s])
{unwrap}    optimizer = optimizer_of(module.parameters(), wrap)
{load}    position, pieces = 0, 1
    for axis, coordinate in zip(mesh.mesh_dim_names, mesh.get_coordinate()):
        if axis.startswith("dp"):
            position, pieces = position * mesh[axis].size() + coordinate, pieces * mesh[axis].size()
    seen = {{}}
    for t, (microbatches, every, clip) in enumerate(steps):
        for m in range(microbatches):
            inputs, targets = batch(s, t, m, pieces, DTYPE)[position]
            wait = (m + 1) % every != 0 and m + 1 < microbatches
            if hasattr(module, "set_requires_gradient_sync"):
                module.set_requires_gradient_sync(not wait)
            with module.no_sync() if wait and hasattr(module, "no_sync") else contextlib.nullcontext():
                (loss(module(inputs).to(DTYPE), targets) / microbatches).backward()
        named = [(name.removeprefix("module."), p) for name, p in module.named_parameters()]
        for name, p in named:
            seen[f"segment {{s}} step {{t}}: gradient {{name}}"] = whole(torch.zeros_like(p) if p.grad is None else p.grad)
        if clip:
            seen[f"segment {{s}} step {{t}}: norm"] = whole({clip})
        optimizer.step()
        optimizer.zero_grad()
        for name, p in named:
            seen[f"segment {{s}} step {{t}}: parameter {{name}}"] = whole(p)
{save}    torch.save(seen, f"{{folder}}/seen{{s}}.{{rank}}")
    dist.destroy_process_group()


def distance(value, truth):
    value, truth = value.double(), truth.double()
    error, size = float((value - truth).norm()), float(truth.norm())
    return error / size if size else (0.0 if error == 0 else math.inf)


def main():
    torch.set_num_threads(1)
    truth, plain = train_plain(torch.float64), train_plain(DTYPE)
    differ = 0
    with tempfile.TemporaryDirectory() as folder:
        for s, (mesh, steps) in enumerate(SEGMENTS):
            ranks = math.prod(mesh.values())
            torch.multiprocessing.start_processes(train_rank, args=(s, folder), nprocs=ranks, start_method="fork")
            for rank in range(ranks):
                for title, value in torch.load(f"{{folder}}/seen{{s}}.{{rank}}").items():
                    if title not in truth:
                        continue
                    far = distance(value, truth[title])
                    if not far <= {factor} * max(distance(plain[title], truth[title]), {epsilon}):
                        differ += 1
                        print(f"rank {{rank}} {{title}}: {{far:.3g}} from the float64 plain run, the plain run in {{DTYPE}}: "
                              f"{{distance(plain[title], truth[title]):.3g}}")
                        print("  sharded:", value.flatten()[:6].tolist())
                        print("  plain:  ", truth[title].flatten()[:6].tolist())
    print("the sharded run differs" if differ else "the sharded run agrees with the plain one")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
'''

SAVE = """
    model_state, optimizer_state = get_state_dict(module, optimizer{options})
    {write}
"""
LOAD = """
    if s:
        {read}
        set_model_state_dict(module, state["model"]{options})
        set_optimizer_state_dict(module, optimizer, state["optimizer"]{options})
"""
DCP_WRITE = 'dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=f"{folder}/saved{s}")'
DCP_READ = """model_state, optimizer_state = get_state_dict(module, optimizer{options})
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=f"{folder}/saved{s - 1}")"""
FULL_WRITE = """if rank == 0:
        torch.save({"model": model_state, "optimizer": optimizer_state}, f"{folder}/saved{s}")"""
FULL_READ = 'state = torch.load(f"{folder}/saved{s - 1}") if rank == 0 else {"model": {}, "optimizer": {}}'
FLAT = ", options=StateDictOptions(flatten_optimizer_state_dict=True)"
FULL = ", options=StateDictOptions(full_state_dict=True, cpu_offload=True)"
FULL_SET = ", options=StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)"
SPOIL = """
    if s:  # what is not loaded shall be noticed
        with torch.no_grad():
            for i, p in enumerate(model.parameters()):
                p.add_(1.0 + i)
"""
UNWRAP = """
    wrap = module.wrap_optimizer if isinstance(module, Sharded) else None
    clip_with = module.clip if isinstance(module, Sharded) else None
    module = module.module if isinstance(module, Sharded) else module
"""


def script_of(subject: Subject, verdict: Verdict) -> str:
    """The script of a counterexample, or nothing if the functions' sources cannot stand by themselves."""
    try:
        if _needs_its_package(inspect.getsource(subject.parallelize)):
            return ""
        text = _script(subject, verdict)
        compile(text, "script", "exec")
        return text
    except (OSError, TypeError, SyntaxError, AttributeError):
        return ""


def _needs_its_package(source: str) -> bool:
    """Whether a script of its own cannot have it: by its imports, or by what it says of a model beside `wrap_optimizer`."""
    return any(word in source for word in ("from .", "parameters=", "gradients=", "microbatch="))


def _script(subject: Subject, verdict: Verdict) -> str:
    draw = Draw(values=dict(verdict.values))
    plan = draw_plan(draw, subject)
    uses_sharded = "Sharded" in inspect.getsource(subject.parallelize)
    functions = [subject.make_model, subject.make_batch, subject.loss, subject.parallelize] + (
        [Sharded] if uses_sharded else []
    )
    imports, texts = sources(functions)
    parts = [_head(subject, plan, verdict, imports)]
    parts += [
        "\n" + ("@dataclass\n" if text.startswith("class Sharded") else "") + _without_docstring(text) + "\n" for text in texts
    ]
    given = _arguments(subject.parallelize, "model, mesh")
    name = subject.loss.__name__
    if name != "loss":
        parts.append(f"\nloss = {name}\n")
    called = f"{subject.parallelize.__name__}({given}**options)"
    parts.append(f"\ndef parallelize_call(model, mesh, options):\n    return {called}\n\n")
    parts.append(_training(subject, plan, uses_sharded))
    return "".join(parts)


def model_choices(subject: Subject, verdict: Verdict) -> set[str]:
    """The names of choices that the model and the batches made, not the plan."""
    draw = Draw(values=dict(verdict.values))
    draw_plan(draw, subject)
    return set(verdict.values) - set(draw.indices)


def _head(subject: Subject, plan: Plan, verdict: Verdict, imports: list[str]) -> str:
    needed = [
        "import contextlib",
        "import math",
        "import sys",
        "import tempfile",
        "from dataclasses import dataclass",
        "from datetime import timedelta",
        "from typing import Any",
        "",
        "import torch",
        "import torch.distributed as dist",
        "import torch.distributed.checkpoint as dcp",
        "import torch.nn as nn",
        "from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict",
        "from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict",
        "from torch.distributed.device_mesh import init_device_mesh",
        "from torch.distributed.tensor import DTensor",
    ]
    segments = [(s.mesh, [(x.microbatches, x.every, x.clip) for x in s.steps]) for s in plan.segments]
    imports = sorted(set(line for line in imports if line not in needed))
    return HEAD.format(
        title=f"{subject.name}: {verdict.kind} [{verdict.where}]",
        message=verdict.message,
        line=verdict.line,
        imports="\n".join(needed + imports),
        segments=repr(segments).replace("inf", "math.inf"),
        options=repr([plan.options_of(segment) for segment in plan.segments]),
        dtype=plan.dtype,
        samples=plan.samples,
        values={name: index for name, index in verdict.values.items() if index and name in model_choices(subject, verdict)},
    )


def _save(how: str) -> str:
    options = {"dcp": "", "flat": FLAT, "full": FULL}[how]
    return SAVE[1:].replace("{write}", FULL_WRITE if how == "full" else DCP_WRITE).replace("{options}", options)


def _load(how: str) -> str:
    options = {"dcp": "", "flat": FLAT, "full": FULL_SET}[how]
    return LOAD[1:].replace("{read}", FULL_READ if how == "full" else DCP_READ).replace("{options}", options)


def _training(subject: Subject, plan: Plan, uses_sharded: bool) -> str:
    kind, settings = OPTIMIZERS[plan.optimizer]
    given = ", ".join(f"{k}={v!r}" for k, v in settings.items())
    several = len(plan.segments) > 1
    return TRAINING.format(
        data=plan.data,
        frozen=plan.frozen,
        make_model=f"{subject.make_model.__name__}({_arguments(subject.make_model, '').removesuffix(', ')})",
        make_batch=subject.make_batch.__name__
        + f"({_arguments(subject.make_batch, '')}generator=generator, count=SAMPLES * pieces)",
        optimizer=f"torch.optim.{kind.__name__}, {given}",
        optimizer_call=f"torch.optim.{kind.__name__}(parameters, {given})",
        spoil=SPOIL[1:] if several else "",
        unwrap=UNWRAP[1:] if uses_sharded else "    wrap = None\n",
        load=_load(plan.checkpoint) if several else "",
        clip=("clip_with(*clip) if clip_with else " if uses_sharded else "")
        + "torch.nn.utils.clip_grad_norm_(module.parameters(), *clip, foreach=False)",
        save="    if s + 1 < len(SEGMENTS):\n" + textwrap.indent(_save(plan.checkpoint), "    ") if several else "",
        factor=FACTOR,
        epsilon=f"torch.finfo({plan.precision or plan.dtype}).eps",
    )


def _without_docstring(text: str) -> str:
    """A class without its own documentation, which a script does not need."""
    if not text.startswith("class Sharded"):
        return text
    start, end = text.index('    """'), text.rindex('"""\n') + 4
    return text[:start] + text[end:].lstrip("\n")


def _arguments(function, others: str) -> str:
    code = function.__code__
    wanted = "draw" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    given = [others] if others else []
    given += ["draw=draw"] if wanted else []
    return ", ".join(given) + (", " if given else "")
