"""Training through fully_shard has the bits of plain PyTorch."""

import copy

import pytest
import torch
from torch import nn

import shardproof
from models import Block, Net, assert_same_bits, batch, exact_norm, loss_of, train_plain

MESHES = {
    "ddp": "dp_shard=2",
    "zero1": "dp_shard=3",
    "zero2": "dp_shard=2",
    "zero3": "dp_shard=3",
    "hsdp": "dp_replicate=2,dp_shard=2",
}


def train(
    model, make_optimizer, *, world, steps, rounds=1, norm_max=None, loss=loss_of, make_batch=batch, threads=None, **options
):
    def body(comm):
        own = copy.deepcopy(model)
        sharded = shardproof.fully_shard(own, comm, **options)
        optimizer, losses = make_optimizer(sharded), []
        for step in range(steps):
            numbers = [(step * rounds + k) * world + comm.rank for k in range(rounds)]
            for number in sharded.microbatches(numbers):
                value = loss(own, make_batch(number))
                (value / rounds).backward()
                losses.append(value.item())
            if norm_max is not None:
                sharded.clip_gradients(norm_max)
            optimizer.step()
        return losses, sharded.gather()

    return shardproof.run_threads(world, body, **(threads or {}))


def check(model, kind, settings, *, world=3, steps=3, rounds=1, norm_max=None, ranks_first=True, **options):
    expected_losses, expected = train_plain(
        model,
        lambda parameters: kind(parameters, **settings),
        steps=steps,
        world=world,
        rounds=rounds,
        norm_max=norm_max,
        ranks_first=ranks_first,
        **{key: options[key] for key in ("loss", "make_batch") if key in options},
    )
    results = train(
        model,
        lambda sharded: shardproof.torch_optimizer(kind, sharded, **settings),
        world=world,
        steps=steps,
        rounds=rounds,
        norm_max=norm_max,
        **options,
    )
    for rank, (losses, parameters) in enumerate(results):
        for step in range(steps):
            for k in range(rounds):
                assert losses[step * rounds + k] == expected_losses[step][k * world + rank]
        assert_same_bits(parameters, dict(expected.named_parameters(remove_duplicate=False)), f"rank {rank}")


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_every_strategy_has_the_bits_of_plain_pytorch(strategy):
    check(Net(), torch.optim.AdamW, {"lr": 0.01}, strategy=strategy, units=[Block])


def test_clipping_has_the_bits_of_an_exact_norm():
    check(Net(), torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, strategy="zero3", units=[Block], norm_max=0.5)


@pytest.mark.parametrize("strategy", ["zero3", "zero1"])
def test_microbatches_are_added_in_the_strategys_order(strategy):
    check(Net(), torch.optim.SGD, {"lr": 0.1}, strategy=strategy, units=[Block], rounds=3, ranks_first=strategy == "zero3")


def test_a_serial_world_with_late_collectives_has_the_same_bits():
    check(
        Net(),
        torch.optim.SGD,
        {"lr": 0.1},
        strategy="zero3",
        units=[Block],
        prefetch_forward=1,
        prefetch_backward=1,
        threads={"schedule": "serial", "completion": "late", "seed": 3},
    )


def test_recomputed_units_and_prefetch_change_no_bit():
    check(
        Net(),
        torch.optim.Adam,
        {"lr": 0.01},
        strategy="zero3",
        units=[Block],
        recompute=[Block],
        prefetch_forward=2,
        prefetch_backward=2,
        buffers="pooled",
        bucket_count=2,
        bucket_multiple=1000,
    )


class Inner(nn.Module):
    """Half of it is a module that is recomputed by itself."""

    def __init__(self):
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.middle = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x):
        return x + self.middle(self.before(x)).tanh()


class Inners(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Inner() for _ in range(4)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(
    "options",
    [
        dict(recompute="blocks.*.middle"),
        dict(offload_activations=[Inner]),
        dict(recompute=[nn.Sequential], offload_activations="blocks.*"),
        dict(recompute=["blocks.0", "blocks.*.middle"], offload_activations=["blocks.0", "blocks.2"]),
    ],
)
def test_recomputed_modules_and_activations_in_the_hosts_memory_change_no_bit(options):
    model = Inners()

    def body(comm, **chosen):
        own = copy.deepcopy(model)
        sharded = shardproof.fully_shard(own, comm, units=[Inner], **chosen)
        own(torch.ones(8, 8) * (comm.rank + 1)).square().sum().backward()
        return sharded.native.gather_gradients(), sharded.host_memory()["activation"]

    plain = shardproof.run_threads(2, body)
    chosen = shardproof.run_threads(2, lambda comm: body(comm, **options))
    for (expected, _), (gradients, (now, most)) in zip(plain, chosen):
        assert expected.keys() == gradients.keys()
        assert all(torch.equal(gradients[name], expected[name]) for name in expected)
        assert now == 0 and (most > 0) == ("offload_activations" in options)


def test_shards_that_lie_side_by_side_change_no_bit():
    check(Net(), torch.optim.Adam, {"lr": 0.01}, strategy="zero3", units=[Block], gather="side_by_side")


def test_parameters_are_kept_within_groups_between_forward_and_backward():
    check(Net(), torch.optim.SGD, {"lr": 0.1}, world=4, strategy="zero3", units=[Block], reshard_after_forward=2)


def test_units_have_options_of_their_own():
    units = [shardproof.Unit("blocks.0", reshard_after_forward=False), shardproof.Unit("blocks.1", recompute=True), "blocks.2"]
    check(Net(), torch.optim.SGD, {"lr": 0.1}, strategy="zero3", units=units)


def test_a_unit_has_a_strategy_and_a_mesh_of_its_own():
    units = [
        shardproof.Unit("blocks.0", strategy="hsdp", mesh="dp_replicate=2,dp_shard=2"),
        shardproof.Unit("blocks.1", strategy="ddp"),
    ]
    model = Net()
    _, expected = train_plain(model, lambda p: torch.optim.SGD(p, lr=0.1), steps=2, world=4)
    for _, parameters in train(model, lambda s: shardproof.sgd(s, lr=0.1), world=4, steps=2, units=units):
        for name, value in expected.named_parameters():
            assert torch.allclose(parameters[name], value, atol=1e-6), name


def test_several_modules_make_up_one_unit():
    class Tail(Net):
        pass

    model = Tail()

    def body(comm):
        own = copy.deepcopy(model)
        sharded = shardproof.fully_shard(own, comm, units=[[own.blocks[1], own.blocks[2], own.out]])
        loss_of(own, batch(comm.rank)).backward()
        shardproof.sgd(sharded, lr=0.1).step()
        return sharded.native.unit_names(), sharded.gather()

    _, expected = train_plain(model, lambda p: torch.optim.SGD(p, lr=0.1), steps=1, world=2)
    for names, parameters in shardproof.run_threads(2, body):
        assert names == ["", "blocks.1"]
        for name, value in expected.named_parameters():
            assert torch.allclose(parameters[name], value, atol=1e-7)


class Rich(nn.Module):
    """Several inputs, keywords, dicts and tuples, a unit that is called twice, tied weights, a frozen one, buffers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.mix = Mix()
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.mix.frozen.requires_grad_(False)

    def forward(self, tokens):
        x = self.embed(tokens)
        pair = {"x": x, "scale": 0.5}
        out = self.mix(pair, shift=x.mean(1, keepdim=True))
        out = self.mix({"x": out["sum"], "scale": 2.0}, shift=out["parts"][0])
        return self.head(self.norm(out["sum"].transpose(1, 2)).transpose(1, 2))


class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.frozen = nn.Parameter(torch.randn(8))

    def forward(self, pair, *, shift):
        y = torch.tanh(self.a(pair["x"])) * pair["scale"] + shift * self.frozen
        return {"sum": pair["x"] + y, "parts": (y, None)}


def rich_batch(index):
    return torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(index))


def rich_loss(model, tokens):
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())


@pytest.mark.parametrize("strategy,recompute", [("zero3", False), ("zero3", True), ("zero2", False)])
def test_dicts_keywords_tied_and_frozen_parameters_and_units_called_twice(strategy, recompute):
    model = Rich()
    units = [shardproof.Unit(Mix, recompute=recompute)]
    check(
        model, torch.optim.AdamW, {"lr": 0.01}, world=2, strategy=strategy, units=units, loss=rich_loss, make_batch=rich_batch
    )


def test_buffers_are_this_ranks_own_and_part_of_the_state_dict():
    def body(comm):
        model = Rich()
        sharded = shardproof.fully_shard(model, comm, units=[Mix])
        rich_loss(model, rich_batch(comm.rank)).backward()
        sharded.skip_step()
        state = sharded.state_dict()
        plain = Rich()
        plain.load_state_dict(state)
        return state

    states = shardproof.run_threads(2, body)
    assert states[0]["norm.num_batches_tracked"] == 1
    assert not torch.equal(states[0]["norm.running_mean"], states[1]["norm.running_mean"])
    assert torch.equal(states[0]["head.weight"], states[1]["embed.weight"])


def test_a_state_dict_of_the_plain_model_can_be_loaded():
    source = Net()

    def body(comm):
        with shardproof.seeded(comm.rank):
            model = Net()
        sharded = shardproof.fully_shard(model, comm, units=[Block])
        sharded.load_state_dict(source.state_dict())
        with pytest.raises(shardproof.Error, match="Missing key"):
            sharded.load_state_dict({})
        return sharded.state_dict()

    for state in shardproof.run_threads(3, body):
        assert_same_bits(state, source.state_dict())


def test_whole_values_are_written_and_gathered_by_name():
    def body(comm):
        model = Net()
        sharded = shardproof.fully_shard(model, comm, units=[Block])
        optimizer = shardproof.sgd(sharded, lr=0.5, momentum=0.5)
        parameters = {name: torch.full_like(value, 2.0) for name, value in sharded.gather_main_parameters().items()}
        sharded.write_parameters(parameters)
        loss_of(model, batch(comm.rank)).backward()
        sharded.write_gradients({name: torch.ones_like(value) for name, value in sharded.gather_gradients().items()})
        optimizer.step()
        for value in sharded.gather_main_parameters().values():
            assert torch.equal(value, torch.full_like(value, 1.5))
        optimizer.write_state("momentum_buffer", {"out.weight": torch.zeros_like(parameters["out.weight"])})
        state = optimizer.gather_state("momentum_buffer")
        assert not state.pop("out.weight").any()
        assert all(torch.equal(value, torch.ones_like(value)) for value in state.values())
        with pytest.raises(shardproof.Error, match="there is no parameter 'nobody'"):
            sharded.write_parameters({"nobody": torch.zeros(1)} if comm.rank == 1 else {})

    shardproof.run_threads(3, body)


def test_ignored_parameters_stay_plain_and_keep_their_gradient():
    def body(comm):
        model = Net()
        sharded = shardproof.fully_shard(model, comm, units=[Block], ignored="out.*")
        loss_of(model, batch(comm.rank)).backward()
        gradient = model.out.weight.grad.clone()
        assert not any(piece.name.startswith("out") for piece in sharded.main_parameters())
        sharded.skip_step()
        return gradient

    gradients = shardproof.run_threads(2, body)
    assert not torch.equal(gradients[0], gradients[1])


def test_rank_0s_values_become_everybodys():
    def body(comm):
        with shardproof.seeded(comm.rank):
            model = Net()
        return shardproof.fully_shard(model, comm, units=[Block]).gather()

    first, second = shardproof.run_threads(2, body)
    assert_same_bits(second, first)


def test_parameters_are_freed_outside_of_their_unit():
    def body(comm):
        model = Net()
        shardproof.fully_shard(model, comm, units=[Block])
        weight = model.blocks[0].up.weight
        assert weight.shape == (24, 12)
        with pytest.raises(RuntimeError, match="is sharded and has no data here"):
            weight.sum().item()

    shardproof.run_threads(2, body)


def test_the_model_becomes_plain_again():
    def body(comm):
        model = Net()
        sharded = shardproof.fully_shard(model, comm, units=[shardproof.Unit(Block, recompute=True)])
        before = sharded.gather()
        plain = sharded.remove()
        assert plain is model
        assert_same_bits(dict(plain.named_parameters()), before)
        loss_of(plain, batch(0)).backward()
        assert plain.out.weight.grad is not None
        again = shardproof.fully_shard(model, comm, units=[Block])
        assert_same_bits(again.gather(), before)

    shardproof.run_threads(2, body)


def test_no_sync_adds_on_this_rank_and_reduces_at_the_end():
    model = Net()

    def body(comm):
        own = copy.deepcopy(model)
        sharded = shardproof.fully_shard(own, comm, strategy="zero2", units=[Block])
        sharded.set_last_microbatch(False)
        with sharded.no_sync():
            loss_of(own, batch(comm.rank)).backward()
        sharded.set_last_microbatch(True)
        loss_of(own, batch(2 + comm.rank)).backward()
        norm = sharded.gradient_norm()
        sharded.skip_step()
        return norm

    gradients = []
    for index in range(4):
        plain = copy.deepcopy(model)
        loss_of(plain, batch(index)).backward()
        gradients.append([p.grad for p in plain.parameters()])
    expected = exact_norm([((a + c) + (b + d)) / 2 for a, b, c, d in zip(*gradients)])
    assert shardproof.run_threads(2, body) == [expected] * 2


@pytest.mark.parametrize(
    "make,settings,kind,plain",
    [
        (shardproof.sgd, {"lr": 0.05, "momentum": 0.9}, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
        (shardproof.adam, {"lr": 0.01}, torch.optim.Adam, {"lr": 0.01}),
        (shardproof.adamw, {"lr": 0.01, "weight_decay": 0.1}, torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    ],
)
def test_the_librarys_optimizers_are_torchs_up_to_rounding(make, settings, kind, plain):
    model = Net()
    _, expected = train_plain(model, lambda parameters: kind(parameters, **plain), steps=3, world=2)
    for _, parameters in train(model, lambda sharded: make(sharded, **settings), world=2, steps=3, units=[Block]):
        for name, value in expected.named_parameters():
            assert torch.allclose(parameters[name], value, rtol=1e-5, atol=1e-6), name


def test_meta_models_are_initialized_shard_by_shard():
    def body(comm):
        with torch.device("meta"):
            model = Net()
        sharded = shardproof.fully_shard(model, comm, units=[Block], initialize=(7, 0.02), broadcast_initial_values=False)
        return sharded.gather()

    one = shardproof.run_threads(1, body)[0]
    for whole in shardproof.run_threads(3, body):
        assert_same_bits(whole, one)
    assert 0.01 < one["blocks.0.up.weight"].std() < 0.03


def test_low_precision_computes_in_it_and_keeps_main_parameters():
    def body(comm):
        model = Net()
        seen = []
        model.blocks[0].up.register_forward_hook(lambda module, args, result: seen.append((args[0].dtype, result.dtype)))
        sharded = shardproof.fully_shard(model, comm, units=[Block], precision=shardproof.Precision(compute=torch.bfloat16))
        loss_of(model, [value.bfloat16() for value in batch(comm.rank)]).backward()
        assert sharded.gradients()[0].data.dtype == torch.float32
        assert sharded.main_parameters()[0].data.dtype == torch.float32
        shardproof.adamw(sharded).step()
        return seen

    for seen in shardproof.run_threads(2, body):
        assert seen == [(torch.bfloat16, torch.bfloat16)]


def test_the_norm_counts_every_element_once():
    model = Net()

    def body(comm):
        own = copy.deepcopy(model)
        sharded = shardproof.fully_shard(own, comm, units=[Block])
        loss_of(own, batch(comm.rank)).backward()
        norm = sharded.gradient_norm()
        sharded.skip_step()
        return norm

    plain = copy.deepcopy(model)
    gradients = []
    for rank in range(3):
        plain.zero_grad()
        loss_of(plain, batch(rank)).backward()
        gradients.append([p.grad.clone() for p in plain.parameters()])
    total = [(a + b + c) / 3 for a, b, c in zip(*gradients)]
    expected = exact_norm(total)
    assert shardproof.run_threads(3, body) == [expected] * 3


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_evaluation_and_training_in_one_autocast_are_those_of_plain_pytorch(strategy):
    """A weight that the evaluation has rounded has no graph."""

    def trained(model, step_of):
        for step in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                with torch.no_grad():
                    loss_of(model, batch(step))
                loss = loss_of(model, batch(step))
            loss.backward()
            step_of()

    torch.manual_seed(0)
    plain = Net()

    def body(comm):
        model = shardproof.fully_shard(copy.deepcopy(plain), comm, strategy=strategy, units=[Block])
        trained(model.module, shardproof.torch_optimizer(torch.optim.SGD, model, lr=0.1).step)
        return model.gather_main_parameters()

    sharded = shardproof.run_threads(1, body)[0]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    trained(plain, lambda: (optimizer.step(), optimizer.zero_grad()))
    assert_same_bits(sharded, dict(plain.named_parameters()))
