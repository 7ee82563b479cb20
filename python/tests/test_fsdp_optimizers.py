"""Optimizers of shardproof.fsdp beside those of torch.optim, on the same shards: the same bits, settings, state and errors."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import TorchDispatchMode

import shardproof
import shardproof.fsdp
from fsdp_on_threads import HALF, shard, whole
from models import Net, assert_same_bits, batch, loss_of
from shardproof.fsdp import fully_shard

RULES = {
    "AdamW": dict(lr=0.01),
    "AdamW amsgrad": dict(lr=0.01, amsgrad=True, maximize=True),
    "AdamW tensors": dict(lr=torch.tensor(0.01), betas=(torch.tensor(0.8), torch.tensor(0.99))),
    "Adam": dict(lr=0.01, weight_decay=0.1),
    "SGD": dict(lr=0.1),
    "SGD momentum": dict(lr=0.1, momentum=0.9, dampening=0.1, maximize=True),
    "SGD nesterov": dict(lr=0.1, momentum=0.9, nesterov=True),
}


def made(lib, name, params, **way):
    """The library's optimizer. Where nothing is chosen, ours is what torch's is with its fused kernel."""
    kind, settings = name.split()[0], copy.deepcopy(RULES[name])
    if lib is not torch.optim:
        return getattr(lib, kind)(params, **settings, **way)
    way = way or {"fused": True}
    if kind == "SGD" and way.get("fused"):
        return fused_sgd(params, **settings)
    return getattr(torch.optim, kind)(params, **settings, **way)


def fused_sgd(groups, **settings):
    """PyTorch's, which takes no DTensors, and together only parameters that all have buffers, or none."""
    alone = []
    for group in groups:
        for p in group["params"]:
            alone.append({**group, "params": [nn.Parameter(p.detach().to_local(), p.requires_grad)]})
            alone[-1]["params"][0].cut = p
    optimizer = torch.optim.SGD(alone, fused=True, **settings)

    def take_gradients(*_):
        for group in optimizer.param_groups:
            gradient = group["params"][0].cut.grad
            group["params"][0].grad = None if gradient is None else gradient.to_local()

    optimizer.register_step_pre_hook(take_gradients)
    return optimizer


def groups_of(model):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    return [{"params": matrices, "weight_decay": 0.2}, {"params": [p for p in model.parameters() if p.dim() < 2], "lr": 0.002}]


def train(model, optimizer, steps=range(5), schedule=True):
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if schedule else None
    for step in steps:
        model.zero_grad()
        for k in range(1 + step % 2):
            loss_of(model, tuple(x.to(model.inp.weight.dtype) for x in batch(7 * step + k))).backward()
        if step in (0, 3):  # these do not begin with the others, and have not as many steps
            model.blocks[1].up.weight.grad = model.out.bias.grad = None
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if schedule:
            scheduler.step()


def held(model, optimizer, has_rows=False):
    """What this rank has of parameters and state, by name, and of what kind state is; with `has_rows` where it has rows."""
    names = {p: name for name, p in model.named_parameters()}
    values, kinds = {name: p.detach().to_local() for name, p in model.named_parameters()}, {}
    for p, state in optimizer.state.items():
        if has_rows and not p.to_local().numel():
            continue
        for key, value in state.items():
            name = f"{names[getattr(p, 'cut', p)]} {key}"
            values[name] = value.to_local() if isinstance(value, DTensor) else value
            if isinstance(p, DTensor):
                kinds[name] = (value.placements, value.shape) if isinstance(value, DTensor) else type(value)
    return values, kinds


def assert_same(ours, theirs):
    assert_same_bits(ours[0], theirs[0])
    assert ours[1] == theirs[1] or not theirs[1]


def both(name, ranks=3, dtype=torch.float32, prepare=lambda model: None, **way):
    """Train with the class of either library, compare what each rank has, and return for how many parameters it has state."""
    base = Net(width=9).to(dtype)

    def body(comm):
        results = []
        for lib in (shardproof.fsdp, torch.optim):
            model = copy.deepcopy(base)
            prepare(model)
            optimizer = made(lib, name, groups_of(shard(comm, model)), **way)
            train(model, optimizer)
            results.append((held(model, optimizer), optimizer))
        (ours, own), (theirs, other) = results
        assert_same(ours, theirs)
        assert isinstance(own, type(other)) and type(own) is not type(other)
        return len(own.state)

    return shardproof.run_threads(ranks, body)


@pytest.mark.parametrize("way", [dict(), dict(fused=True), dict(foreach=True), dict(fused=False)], ids=str)
@pytest.mark.parametrize("name", RULES)
def test_each_class_has_the_bits_and_the_state_of_pytorchs_and_where_nothing_is_chosen_of_its_fused_kernel(name, way):
    if "tensors" in name and "foreach" in way:
        pytest.skip("PyTorch refuses it")
    both(name, **way)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["AdamW", "SGD momentum"])
def test_each_dtype_has_the_bits_of_pytorchs_fused_kernel(name, dtype):
    if dtype == torch.bfloat16 and name.startswith("SGD") and torch.__version__.startswith("2.11."):
        pytest.skip("momenta of PyTorch's fused SGD in bfloat16 differ from run to run in torch 2.11")
    both(name, dtype=dtype)


def test_frozen_parameters_have_no_state_and_ranks_may_have_no_rows():
    parameters = len(list(Net().parameters()))
    assert both("AdamW", ranks=7, prepare=lambda model: model.blocks[0].requires_grad_(False)) == [parameters - 6] * 7


def test_state_that_lies_otherwise_than_its_parameter_is_updated_right():
    def body(comm):
        results = []
        for lib in (shardproof.fsdp, torch.optim):
            with shardproof.seeded(0):
                model = Net(width=9)
            shard(comm, model)
            optimizer = lib.AdamW(model.parameters(), lr=0.01)
            train(model, optimizer, range(2), schedule=False)
            for state in optimizer.state.values():
                for key in ("exp_avg", "exp_avg_sq"):
                    value = state[key]
                    by_columns = value.to_local().mT.contiguous().mT if value.dim() == 2 else value.to_local()
                    state[key] = DTensor.from_local(by_columns, value.device_mesh, value.placements,
                                                    run_check=False, shape=value.shape, stride=value.stride())
            assert not optimizer.state[model.blocks[0].up.weight]["exp_avg"].to_local().is_contiguous()
            train(model, optimizer, range(2, 5), schedule=False)
            results.append(whole(model))
        for name, value in results[1].items():
            torch.testing.assert_close(results[0][name], value, rtol=1e-4, atol=1e-6)

    shardproof.run_threads(2, body)


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "aten":
            self.seen.append((function.overloadpacket.__name__, len(args[0]) if isinstance(args[0], list) else 1, *types))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name, kernel", [("AdamW", "adamw"), ("Adam", "adam"), ("SGD momentum", "sgd")])
def test_a_step_is_a_call_of_the_kernel_for_small_tensors_together_and_one_for_the_others_of_a_group(name, kernel):
    def body(comm):
        model = shard(comm, Net(width=16))
        optimizer = made(shardproof.fsdp, name, groups_of(model))
        train(model, optimizer, range(2), schedule=False)
        with Operators() as operators:
            optimizer.step()
        expected = []
        for group in optimizer.param_groups:
            others = [p for p in group["params"] if p.to_local().nbytes > 512 or p.to_local().nbytes % 64]
            assert 0 < len(others) < len(group["params"]) - 1
            expected += [(f"_fused_{kernel}_", 1), (f"_fused_{kernel}_", len(others))]
        assert operators.seen == expected

    shardproof.run_threads(1, body)


SIZES = [(16,), (32,), (3, 16), (7,), (128,), (129,), (72,), (256,), (40, 40), (0,), (16,)]


def trained_alone(lib, name, dtype, way, change=lambda step, optimizer: None):
    """What plain tensors, some small and some not, become of gradients that some of them lack at times."""
    noise = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(size, generator=noise).to(dtype)) for size in SIZES]
    groups = [params[:4], params[4:]] if lib is shardproof.fsdp else [[p] for p in params]  # SGD's fused one takes no other
    optimizer = getattr(lib, name.split()[0])([{"params": group} for group in groups], **copy.deepcopy(RULES[name]), **way)
    for step in range(6):
        for i, p in enumerate(params):
            p.grad = torch.randn(p.shape, generator=noise).to(dtype) if (i + step) % 4 or i > 7 else None
        change(step, optimizer)
        optimizer.step()
        if step == 3:
            other = type(optimizer)([{"params": group} for group in groups], lr=9.0, **way)
            other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer = other
    gradients = {f"{i} gradient": p.grad for i, p in enumerate(params) if p.grad is not None}
    kept = {f"{i} {key}": value for i, p in enumerate(params) for key, value in optimizer.state[p].items()}
    kept = {name: value for name, value in kept.items() if value is not None}
    return {**{str(i): p.detach() for i, p in enumerate(params)}, **gradients, **kept}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RULES)
def test_small_tensors_that_are_updated_together_have_the_bits_of_each_alone(name, dtype):
    if dtype == torch.bfloat16 and name.startswith("SGD") and torch.__version__.startswith("2.11."):
        pytest.skip("momenta of PyTorch's fused SGD in bfloat16 differ from run to run in torch 2.11")
    ours, theirs = (trained_alone(lib, name, dtype, {"fused": True}) for lib in (shardproof.fsdp, torch.optim))
    assert_same_bits(ours, theirs)


@pytest.mark.parametrize("name", ["AdamW", "SGD momentum"])
def test_a_scale_that_is_left_to_the_kernel_is_taken_off_the_gradients_too(name):
    def scaled(step, optimizer):
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(float(step == 2))

    ours, theirs = (
        trained_alone(lib, name, torch.float32, {"fused": True}, scaled) for lib in (shardproof.fsdp, torch.optim)
    )
    assert_same_bits(ours, {key: theirs[key] for key in ours})


def test_parameters_that_share_memory_are_updated_one_after_the_other():
    results = []
    for kind, way in ((shardproof.fsdp.AdamW, {}), (torch.optim.AdamW, {"fused": True})):
        memory = torch.linspace(-1, 1, 48)
        params = [nn.Parameter(memory[begin : begin + 32]) for begin in (16, 0)]
        optimizer = kind(params, lr=0.01, **way)
        for _ in range(2):
            for i, p in enumerate(params):
                p.grad = torch.linspace(i - 1, i + 1, 32)
            optimizer.step()
        results.append({"memory": memory})
    assert_same_bits(*results)


def test_state_that_parameters_share_is_updated_by_one_after_the_other():
    results = []
    for kind, way in ((shardproof.fsdp.SGD, {}), (torch.optim.SGD, {"fused": True})):
        params = [nn.Parameter(torch.linspace(i, i + 1, 16)) for i in range(2)]
        optimizer = kind(params, lr=0.1, momentum=0.9, **way)
        shared = torch.linspace(0, 1, 16)
        for i, p in enumerate(params):
            optimizer.state[p]["momentum_buffer"] = shared
            p.grad = torch.full((16,), i + 1.0)
        optimizer.step()
        results.append({str(i): p.detach() for i, p in enumerate(params)} | {"shared": shared})
    assert_same_bits(*results)


def test_a_gradient_that_is_negated_where_it_is_read_counts_as_what_it_is():
    p = nn.Parameter(torch.zeros(16))
    p.grad = torch._neg_view(torch.ones(16))
    shardproof.fsdp.SGD([p], lr=0.5).step()
    assert torch.equal(p.detach(), torch.full((16,), 0.5))


def test_what_is_no_tensor_is_refused_and_a_tuple_of_parameters_is_taken():
    p = nn.Parameter(torch.zeros(16))
    p.grad = torch.ones(16)
    optimizer = shardproof.fsdp.SGD([p], lr=0.5)
    optimizer.param_groups[0]["params"] = (p,)
    optimizer.step()
    assert torch.equal(p.detach(), torch.full((16,), -0.5))
    optimizer.param_groups[0]["params"] = [p, 3]
    with pytest.raises(shardproof.Error, match="a group of parameters has a int. Give it tensors"):
        optimizer.step()


def test_autograd_sees_that_a_small_tensor_was_updated():
    p = nn.Parameter(torch.linspace(-1, 1, 16))
    optimizer = shardproof.fsdp.SGD([p], lr=0.1, momentum=0.9)
    saved = (p * p).sum()
    p.grad = torch.ones(16)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()
    before = optimizer.state[p]["momentum_buffer"]._version
    optimizer.step()
    assert optimizer.state[p]["momentum_buffer"]._version > before


@pytest.mark.parametrize("way", [dict(), dict(foreach=True), dict(fused=False)], ids=str)
@pytest.mark.parametrize("name", ["AdamW", "SGD momentum"])
def test_on_gpus_the_fused_kernel_is_taken_where_nothing_else_is_chosen(name, way, monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensorMode  # pylint: disable=import-outside-toplevel

    calls = []
    for kernel in ("_fused_adamw_", "_fused_sgd_"):
        monkeypatch.setattr(torch, kernel, lambda *lists, **_: calls.append(lists))
    with FakeTensorMode(allow_non_fake_inputs=True):  # no GPU is needed
        p = nn.Parameter(torch.empty(8, device="cuda"))
        optimizer = made(shardproof.fsdp, name, [p], **way)
        for _ in range(2):
            p.grad = torch.empty(8, device="cuda")
            optimizer.step()
    assert len(calls) == (0 if way else 2)
    assert all(tensor.is_cuda for lists in calls for tensors in lists for tensor in tensors)


def test_state_goes_to_pytorchs_class_and_back_and_through_checkpoints(tmp_path):
    folder = str(tmp_path / "step")

    def begin(comm, lib):
        with shardproof.seeded(0):
            model = shard(comm, Net(width=9))
        optimizer = made(lib, "AdamW", groups_of(model), fused=True)
        return model, optimizer

    def body(comm):
        expected = begin(comm, torch.optim)
        train(*expected, range(8), schedule=False)
        run = begin(comm, shardproof.fsdp)
        train(*run, range(2), schedule=False)
        for index, lib in enumerate((torch.optim, shardproof.fsdp)):  # by state dicts
            model, optimizer = begin(comm, lib)
            model.load_state_dict(run[0].state_dict())
            if index == 0:
                optimizer.load_state_dict(copy.deepcopy(run[1].state_dict()))
            else:
                set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(*run))
            run = model, optimizer
            train(*run, range(2 + index, 3 + index), schedule=False)
        for index, lib in enumerate((torch.optim, shardproof.fsdp)):  # by checkpoints
            shardproof.save(f"{folder}_{index}", *run)
            run = begin(comm, lib)
            shardproof.load(f"{folder}_{index}", *run)
            train(*run, range(4 + 2 * index, 6 + 2 * index), schedule=False)
        # A checkpoint of this library has no state for what a rank has no rows of.
        assert_same(held(*run, has_rows=True), held(*expected, has_rows=True))

    shardproof.run_threads(2, body)


@pytest.mark.parametrize("way", [dict(), dict(fused=True)], ids=str)
@pytest.mark.parametrize("name", ["AdamW", "SGD momentum"])
@pytest.mark.parametrize("overflows, turned", [(0, False), (1, False), (1, True)])
def test_a_step_that_overflows_is_left_out_and_counts_nowhere(name, way, overflows, turned):
    def turn(p):  # its gradient lies by columns, which PyTorch's fused kernel would take for rows
        local = p.grad.to_local().t().contiguous().t()
        p.grad = DTensor.from_local(local, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())

    def body(comm):
        results = []
        for scaled in (False, True):
            with shardproof.seeded(0):
                model = shard(comm, Net())
            optimizer = made(shardproof.fsdp, name, groups_of(model), **way)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            for step in range(4):
                model.zero_grad()
                loss = loss_of(model, batch(step))
                if scaled:
                    scaler.scale(loss * (1e38 if step == overflows and comm.rank == 1 else 1)).backward()
                    if turned:
                        turn(model.inp.weight)
                    scaler.step(optimizer)
                    scaler.update()
                elif step != overflows:
                    loss.backward()
                    if turned:
                        turn(model.inp.weight)
                    optimizer.step()
            results.append(held(model, optimizer))
        assert scaler.get_scale() == 4.0
        assert_same(*results)

    shardproof.run_threads(2, body)


def test_gradients_that_are_cut_otherwise_and_graphs_through_a_step_are_pytorchs_own():
    def body(comm):
        said = []
        for lib in (shardproof.fsdp, torch.optim):
            model = shard(comm, Net())
            loss_of(model, batch(0)).backward()
            for settings in (dict(differentiable=True), dict()):
                try:
                    lib.AdamW(model.parameters(), **settings).step()
                    said.append("")  # as torch 2.11 takes the second one
                except RuntimeError as error:
                    said.append(str(error))
                for p in model.parameters():
                    p.grad = p.grad.redistribute(placements=[Replicate()])
        assert said[:2] == said[2:] and "leaf Variable" in said[0] and ("placement" in said[1] or not said[1])

    shardproof.run_threads(2, body)


def test_hooks_and_closures_are_those_of_pytorchs_steps():
    def body(comm):
        with shardproof.seeded(0):
            model = shard(comm, Net(), mp_policy=HALF)  # whose units have copies of shards
        optimizer, seen, waiting = shardproof.fsdp.AdamW(model.parameters(), lr=0.01), [], []
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))

        def closure():  # whose forward is the model's first
            seen.append(torch.is_grad_enabled())
            optimizer.zero_grad()
            waiting.append(loss_of(model, batch(1)))  # for a backward that does not come
            loss = loss_of(model, batch(0))
            loss.backward()
            return loss

        first = optimizer.step(closure).item()
        assert loss_of(model, batch(0)).item() < first and optimizer.step(closure).item() < first
        assert seen == ["before", True, "after"] * 2

    shardproof.run_threads(2, body)


def test_a_class_of_the_callers_may_step_around_the_step_of_ours():
    class Halved(shardproof.fsdp.AdamW):
        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                p.grad._local_tensor.mul_(0.5)
            return super().step(closure)

    def body(comm):
        results = []
        for kind, factor in ((shardproof.fsdp.AdamW, 0.5), (Halved, 1)):
            with shardproof.seeded(0):
                model = shard(comm, Net())
            optimizer = kind(model.parameters(), lr=0.01)
            for step in range(2):
                model.zero_grad()
                (loss_of(model, batch(step)) * factor).backward()
                optimizer.step()
            results.append(held(model, optimizer))
        assert_same(*results)

    shardproof.run_threads(2, body)


def test_parameters_that_are_not_sharded_and_optimizers_that_are_copied_go_on():
    plain = [nn.Parameter(torch.linspace(-1, 1, 7)), nn.Parameter(torch.ones(2, dtype=torch.complex64))]

    def trained(kind, **settings):
        params = copy.deepcopy(plain)
        optimizer = kind([{"params": [p]} for p in params], lr=0.01, **settings)
        for _ in range(2):
            for p in optimizer.param_groups[0]["params"] + optimizer.param_groups[1]["params"]:
                p.grad = p.detach() * 2
            optimizer.step()
            optimizer = copy.deepcopy(optimizer)
        return [group["params"][0].detach() for group in optimizer.param_groups]

    ours, loops = trained(shardproof.fsdp.AdamW), trained(torch.optim.AdamW)
    assert torch.equal(ours[1], loops[1]) and not torch.equal(ours[1], plain[1])
    torch.testing.assert_close(ours[0], loops[0])
