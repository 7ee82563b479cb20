"""Modules that are not as most are: weights that hooks compute, modules that are shared, copied, sparse, or that do not run."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import shardproof
from models import assert_same_bits

EVERY = ["ddp", "zero1", "zero2", "zero3"]


def pair():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def of_a_hook():
    """As prune does it, with a weight that was computed without a graph so far."""
    linear = nn.Linear(4, 4)
    weight = linear._parameters.pop("weight")
    linear.register_parameter("weight_orig", weight)
    linear.weight = (2 * weight).detach()
    linear.register_forward_pre_hook(lambda module, args: setattr(module, "weight", 2 * module.weight_orig))
    return linear


COMPUTED = {
    "weight_norm": lambda: nn.utils.weight_norm(nn.Linear(4, 4)),
    "spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
    "pruned": lambda: prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5),
    "pruned bias": lambda: prune.l1_unstructured(nn.Linear(4, 4), "bias", 0.5),
    "pruned embedding": lambda: prune.l1_unstructured(nn.Embedding(4, 4), "weight", 0.5),
    "of a hook": of_a_hook,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize("units", [[], ["0"]])
@pytest.mark.parametrize("kind", COMPUTED)
def test_a_weight_that_a_hook_computes_is_no_parameter(kind, units, strategy):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(COMPUTED[kind]())

    x = torch.arange(4) if "embedding" in kind else torch.ones(4, 4)
    models = [make() for _ in range(2)]

    def body(comm):
        model = models[comm.rank]
        sharded = shardproof.fully_shard(model, comm, strategy=strategy, units=units)
        optimizer = shardproof.torch_optimizer(torch.optim.SGD, sharded, lr=0.1)
        for _ in range(2):
            model(x).square().mean().backward()
            optimizer.step()
        return sharded.gather_main_parameters(), sharded.state_dict()

    plain = make()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        plain(x).square().mean().backward()
        optimizer.step()
    for parameters, state in shardproof.run_threads(2, body):
        assert_same_bits(parameters, dict(plain.named_parameters()))
        assert_same_bits(state, plain.state_dict())


def test_a_style_is_refused_for_a_layer_whose_weight_a_hook_computes():
    models = [nn.Sequential(of_a_hook()) for _ in range(2)]

    def body(comm):
        shardproof.parallelize(models[comm.rank], shardproof.MeshComm(comm, "tp=2"), plan={"0": shardproof.ColumnParallel()})

    with pytest.raises(shardproof.Error, match="'0'"):
        shardproof.run_threads(2, body)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_modules_of_a_sharded_model_belong_to_no_second_one(strategy):
    models = [pair() for _ in range(2)]

    def body(comm):
        model = models[comm.rank]
        first = shardproof.fully_shard(model, comm, strategy=strategy)
        second = nn.Sequential(model[0], nn.Linear(2, 2))
        with pytest.raises(shardproof.Error, match="parameter 0.weight belongs to another sharded model"):
            shardproof.fully_shard(second, comm, strategy=strategy)
        first.remove()
        return sorted(shardproof.fully_shard(second, comm, strategy=strategy).state_dict())

    assert shardproof.run_threads(2, body) == [["0.bias", "0.weight", "1.bias", "1.weight"]] * 2


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_sharded_model_is_not_copied_and_not_pickled(strategy):
    models = [pair() for _ in range(2)]

    def body(comm):
        sharded = shardproof.fully_shard(models[comm.rank], comm, strategy=strategy)
        for copied in (copy.deepcopy, lambda model: torch.save(model, io.BytesIO())):
            with pytest.raises(RuntimeError, match="cannot be copied or pickled|is sharded and has no data here"):
                copied(sharded.module)
        copy.deepcopy(sharded.remove())

    shardproof.run_threads(2, body)


def test_sparse_gradients_train_as_dense_ones():
    x = torch.tensor([0, 2, 2])

    def make(sparse):
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(4, 3, sparse=sparse), nn.Linear(3, 1))

    models = [make(True) for _ in range(2)]

    def body(comm):
        sharded = shardproof.fully_shard(models[comm.rank], comm, units=[nn.Embedding])
        optimizer = shardproof.torch_optimizer(torch.optim.SGD, sharded, lr=0.1)
        for last in (False, True):
            sharded.set_last_microbatch(last)
            sharded.module(x).square().mean().backward()
        optimizer.step()
        return sharded.gather_main_parameters()

    plain = make(False)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        plain(x).square().mean().backward()
    optimizer.step()
    for parameters in shardproof.run_threads(2, body):
        for name, value in plain.named_parameters():
            torch.testing.assert_close(parameters[name], value.detach())


def test_fsdp2s_fully_shard_takes_a_list_of_modules_as_one_unit():
    from shardproof import fsdp

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2), nn.Linear(2, 1))

    x, base = torch.ones(4, 2), make()
    plain = copy.deepcopy(base)
    plain(x).square().mean().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()

    def body(comm):
        model = copy.deepcopy(base)
        pair = [model[0], model[2]]
        assert fsdp.fully_shard(pair, mesh=shardproof.MeshComm(comm, "dp_shard=2")) is pair
        fsdp.fully_shard(model, mesh=shardproof.MeshComm(comm, "dp_shard=2"))
        optimizer = fsdp.SGD(model.parameters(), lr=0.1)
        for part in pair:
            part.unshard()
            assert all(each.weight.isfinite().all() for each in pair)
            part.reshard()
        model(x).square().mean().backward()
        optimizer.step()
        sharded = fsdp.sharded_of(model)
        assert len(sharded.units()) == 2 and type(pair[0]) is type(pair[1])
        return sharded.gather()

    for parameters in shardproof.run_threads(2, body):
        for name, value in plain.named_parameters():
            torch.testing.assert_close(parameters[name], value.detach())
    with pytest.raises(shardproof.Error, match="takes a module, or a list of modules that make up one unit, got 'model'"):
        fsdp.fully_shard("model")

    def refused(comm):
        alone = make()
        fsdp.fully_shard([alone, alone[0]], mesh=shardproof.MeshComm(comm, "dp_shard=1"))
        with pytest.raises(shardproof.Error, match="the outermost module is one of a list"):
            alone(x)

    shardproof.run_threads(1, refused)


def test_a_registered_method_runs_with_gathered_parameters():
    from shardproof import fsdp

    class Scored(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.body, self.head = nn.Linear(2, 2), nn.Linear(2, 1)

        def forward(self, x):
            return self.head(torch.tanh(self.body(x)))

        def score(self, x, times=1):
            return times * torch.nn.functional.linear(x, self.head.weight[:, :2]).sum() + self(x).sum()

    x, base = torch.ones(3, 2), Scored()
    plain = copy.deepcopy(base)
    plain.score(x, times=2).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()

    def body(comm):
        model = copy.deepcopy(base)
        mesh = shardproof.MeshComm(comm, "dp_shard=2")
        fsdp.fully_shard(model, mesh=mesh)
        fsdp.register_fsdp_forward_method(model, "score")
        optimizer = fsdp.SGD(model.parameters(), lr=0.1)
        model.score(x, times=2).backward()
        optimizer.step()
        untouched = Scored()
        fsdp.register_fsdp_forward_method(untouched, "score")
        assert "score" not in vars(untouched)
        return fsdp.sharded_of(model).gather()

    for parameters in shardproof.run_threads(2, body):
        for name, value in plain.named_parameters():
            torch.testing.assert_close(parameters[name], value.detach())


def test_the_package_has_the_names_of_fsdp2():
    import torch.distributed.fsdp._fully_shard as theirs

    from shardproof import fsdp

    for name in set(theirs.__all__) - {"GradientReductionHandle"}:  # of newer torch, for what the package has not
        assert getattr(fsdp, name) is not None
    assert fsdp.MixedPrecisionPolicy is theirs.MixedPrecisionPolicy
    assert fsdp.share_comm_ctx([]) is None


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_a_module_of_torchscript_is_no_unit_and_trains_within_one():
    def make():
        torch.manual_seed(0)
        return nn.Sequential(torch.jit.script(nn.Linear(2, 2)), nn.Linear(2, 2))

    models = [make() for _ in range(2)]

    def body(comm):
        with pytest.raises(shardproof.Error, match="a unit, or a module that is recomputed, is a RecursiveScriptModule"):
            shardproof.fully_shard(models[comm.rank], comm, units=["0"])
        sharded = shardproof.fully_shard(models[comm.rank], comm)
        optimizer = shardproof.torch_optimizer(torch.optim.SGD, sharded, lr=0.1)
        for _ in range(2):
            sharded.module(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        return sharded.gather_main_parameters()

    plain = make()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        plain(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    for parameters in shardproof.run_threads(2, body):
        assert_same_bits(parameters, dict(plain.named_parameters()))


@pytest.mark.parametrize("strategy", EVERY)
def test_a_unit_that_is_gathered_ahead_and_does_not_run_changes_nothing(strategy):
    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
            self.skips = False

        def forward(self, x):
            x = self.a(x)
            return self.c(x if self.skips else self.b(x))

    def make():
        torch.manual_seed(0)
        return Skips()

    def run(model, optimizer):
        for step in range(4):
            model.skips = step % 2 == 1
            with torch.no_grad():
                model(torch.ones(1, 2))
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            for parameter in model.parameters():  # a unit that no rank used has gradients of zero
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is not None else None

    models = [make() for _ in range(2)]

    def body(comm):
        sharded = shardproof.fully_shard(
            models[comm.rank], comm, strategy=strategy, units=[nn.Linear], prefetch_forward=2, prefetch_backward=2
        )
        optimizer = shardproof.torch_optimizer(torch.optim.SGD, sharded, lr=0.1)
        run(sharded.module, optimizer)
        with torch.no_grad():
            sharded.module(torch.ones(1, 2))
        state = sharded.state_dict()
        sharded.unit("b").reshard()
        sharded.remove()
        return state

    plain = make()
    run(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    for state in shardproof.run_threads(2, body):
        assert_same_bits(state, plain.state_dict())
