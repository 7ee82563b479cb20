"""Each option of fully_shard does what its documentation says, beside its default: values come from plain PyTorch."""

import copy
import re

import pytest
import torch
from torch import nn

import shardproof
from models import Block, Net, assert_same_bits, batch, loss_of, train_plain
from shardproof.units import select_units


class Given(nn.Module):
    """A model whose gradient is what it was given, bit for bit."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, gradient):
        return (self.weight.float() * gradient).sum()


def summed(terms, **options):
    """The final gradient of ranks and microbatches that have these terms: terms[microbatch][rank]."""
    world = len(terms[0])

    def body(comm):
        model = Given(terms[0][0].numel())
        sharded = shardproof.fully_shard(model, comm, **options)
        for each in sharded.microbatches(terms):
            sharded(each[comm.rank]).backward()
        gradient = sharded.gather_gradients()["weight"]
        sharded.skip_step()
        return gradient

    first, *others = shardproof.run_threads(world, body)
    assert all(torch.equal(first, other) for other in others)
    return first


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_sum_is_divided_where_it_is_asked_to_be():
    a, b, c = drawn(3, 64)
    terms = [[a, b, c]]
    after, before = (a + b + c) / 3, a / 3 + b / 3 + c / 3
    assert not torch.equal(after, before)
    assert torch.equal(summed(terms), after)
    assert torch.equal(summed(terms, divide="before"), before)
    assert torch.equal(summed(terms, gradient_divide=5), (a + b + c) / 5)
    # In float16 the sum overflows, each third is rounded, and a half is exact.
    big = [[torch.full((64,), 40000.0)] * 3]
    half = {"precision": shardproof.Precision(reduce=torch.float16), "check_gradients": False}
    assert summed(big, **half).isinf().all()
    third = (torch.tensor(40000.0) / 3).half()
    assert torch.equal(summed(big, divide="before", **half), (third + third + third).float().expand(64))
    assert torch.equal(summed(big, divide="split", **half), torch.full((64,), 40000.0))
    # In bfloat16 the quotient of a collective is rounded too, and that of the sum is not.
    low = {"precision": shardproof.Precision(reduce=torch.bfloat16)}
    ones = [[torch.ones(64)] * 2 + [torch.full((64,), 3.0)]]
    assert torch.equal(summed(ones, **low), torch.full((64,), 5.0) / 3)
    inside = summed(ones, divide="in_collective", **low)
    assert torch.equal(inside, inside.bfloat16().float()) and (inside - 5 / 3).abs().max() < 0.02


def test_tokens_of_all_ranks_and_microbatches_divide_the_sum():
    terms = [list(drawn(2, 64)), list(drawn(2, 64, seed=1))]
    counts = [[3, 5], [7, 1]]

    def body(comm):
        sharded = shardproof.fully_shard(Given(64), comm, divide_by_tokens=True)
        for k, each in enumerate(sharded.microbatches(terms)):
            sharded.add_tokens(counts[k][comm.rank])
            sharded(each[comm.rank]).backward()
        return sharded.gather_gradients()["weight"]

    (a, b), (c, d) = terms
    for got in shardproof.run_threads(2, body):
        assert torch.equal(got, ((a + b) + (c + d)) / 16)


def test_replicas_are_summed_once_a_step_or_after_every_microbatch():
    terms = [list(drawn(4, 64, seed=k)) for k in range(3)]
    shards = [[each[0] + each[1] for each in terms], [each[2] + each[3] for each in terms]]
    once = (sum(shards[0][1:], shards[0][0]) + sum(shards[1][1:], shards[1][0])) / 4
    each_time = [left + right for left, right in zip(*shards)]
    every = sum(each_time[1:], each_time[0]) / 4
    assert not torch.equal(once, every)
    options = {"strategy": "hsdp", "mesh": "dp_replicate=2,dp_shard=2"}
    assert torch.equal(summed(terms, **options), once)
    assert torch.equal(summed(terms, reduce_replicas_every_microbatch=True, **options), every)


def test_the_dtypes_of_a_precision_are_those_of_its_fields():
    a, b, c = drawn(3, 64)
    low = [each.bfloat16() for each in (a, b, c)]
    on_the_wire = summed([[a, b, c]], precision=shardproof.Precision(reduce=torch.bfloat16))
    assert torch.equal(on_the_wire, (low[0] + low[1] + low[2]).float() / 3)
    wide = summed([[a, b, c]], precision=shardproof.Precision(reduce=torch.bfloat16, float32_sums=True))
    exact = (low[0].float() + low[1].float() + low[2].float()).bfloat16().float() / 3
    assert torch.equal(wide, exact) and not torch.equal(wide, on_the_wire)

    def body(comm):
        seen = {}
        model = Net().double()
        model.blocks[0].register_forward_pre_hook(lambda module, args: seen.update(input=args[0].dtype))
        precision = shardproof.Precision(
            main=torch.float32, compute=torch.bfloat16, gradient=torch.bfloat16, output=torch.float64, cast_inputs=False
        )
        sharded = shardproof.fully_shard(model, comm, precision=precision)
        x = batch(0)[0].bfloat16()
        result = sharded(x)
        result.square().mean().backward()
        dtypes = {piece.data.dtype for piece in sharded.main_parameters()}
        with pytest.raises(RuntimeError, match="dtype"):  # an input that is not cast
            sharded(x.double())
        return result.dtype, dtypes

    assert shardproof.run_threads(2, body) == [(torch.float64, {torch.float32})] * 2


def test_a_gradient_above_the_largest_magnitude_is_an_error_that_names_it():
    def body(comm, largest):
        sharded = shardproof.fully_shard(Given(8), comm, gradient_magnitude_max=largest)
        sharded(torch.full((8,), 2.0)).backward()
        return sharded.gather_gradients()["weight"].max().item()

    assert shardproof.run_threads(2, lambda comm: body(comm, 2.5)) == [2.0, 2.0]
    with pytest.raises(RuntimeError, match="the gradient of weight is 2 at element 0 of 8"):
        shardproof.run_threads(2, lambda comm: body(comm, 1.5))


def is_whole(module):
    try:
        return module.weight.sum().item() is not None
    except RuntimeError:
        return False


@pytest.mark.parametrize("root", [None, True, False])
@pytest.mark.parametrize("after_backward", [True, False])
def test_what_stays_whole_after_a_forward_and_a_backward(root, after_backward):
    base = Net()

    def body(comm):
        model = copy.deepcopy(base)
        options = {"root_reshard_after_forward": root, "reshard_after_backward": after_backward}
        sharded = shardproof.fully_shard(model, comm, units=[Block], **options)
        optimizer = shardproof.torch_optimizer(torch.optim.SGD, sharded, lr=0.1)
        for step in range(2):
            value = loss_of(model, batch(2 * step + comm.rank))
            between = is_whole(model.out), is_whole(model.blocks[1].up)
            value.backward()
            after = is_whole(model.out), is_whole(model.blocks[1].up)
            optimizer.step()
        return between, after, sharded.gather()

    _, expected = train_plain(base, lambda p: torch.optim.SGD(p, lr=0.1), steps=2, world=2)
    for between, after, values in shardproof.run_threads(2, body):
        assert between == (root is not True, False)
        assert after == (not after_backward, not after_backward)
        assert_same_bits(values, dict(expected.named_parameters()))


def held(most=False, **options):
    """Bytes of rank 0 by what they are for, between steps or at most, with what is on the host; and the final values."""
    base = Net(width=32)

    def body(comm):
        model = copy.deepcopy(base)
        sharded = shardproof.fully_shard(model, comm, units=[Block], **options)
        optimizer = shardproof.sgd(sharded, lr=0.1, momentum=0.5)
        for step in range(2):
            sharded.reset_peak_memory()
            loss_of(model, batch(2 * step + comm.rank)).backward()
            optimizer.step()
        bytes_of = {name: value[most] for name, value in sharded.memory().items()}
        return bytes_of, {name: value[most] for name, value in sharded.host_memory().items()}, sharded.gather()

    memory, host, values = shardproof.run_threads(2, body)[0]
    _, expected = train_plain(base, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5), steps=2, world=2)
    for name, value in expected.named_parameters():
        assert torch.allclose(values[name], value, rtol=1e-5, atol=1e-6), name
    return memory, host


def test_options_of_memory_change_what_lies_where_and_no_value():
    plain, plain_host = held()
    parameters = sum(p.numel() for p in Net(width=32).parameters()) * 4
    assert plain["optimizer"] == pytest.approx(parameters / 2, abs=4096) and sum(plain_host.values()) == 0
    for offload in ("pinned", "pageable"):
        memory, host = held(offload=offload)
        assert memory["optimizer"] == 0 and host["optimizer"] == plain["optimizer"]
    most, _ = held(most=True)
    assert most["gathered"] > 0 == plain["gathered"]
    ahead, _ = held(most=True, prefetch_forward=3, prefetch_backward=3)
    bounded, _ = held(most=True, prefetch_forward=3, prefetch_backward=3, bytes_in_flight_max=1)
    assert bounded["gathered"] <= most["gathered"] + 4096 < ahead["gathered"]


def test_parameters_of_at_most_so_many_elements_stay_whole():
    def held_of(**options):
        def body(comm):
            sharded = shardproof.fully_shard(Net(width=32), comm, units=[Block], **options)
            sizes = {}
            for piece in sharded.parameters():
                sizes[piece.name] = sizes.get(piece.name, 0) + piece.data.numel()
            return sizes

        return shardproof.run_threads(2, body)

    whole = {name: p.numel() for name, p in Net(width=32).named_parameters()}
    held(keep_whole_numel_max=64)
    for sizes in held_of(keep_whole_numel_max=64):
        assert all(sizes[name] == numel for name, numel in whole.items() if numel <= 64)
        assert sum(sizes.values()) < 0.6 * sum(whole.values())
    assert sum(sum(sizes.values()) for sizes in held_of()) == sum(whole.values())


def buckets_of(**options):
    """How many buckets the root and the blocks have, and their bytes on one rank."""

    def body(comm):
        lines = shardproof.fully_shard(Net(width=16), comm, units=[Block], **options).describe().splitlines()
        return [tuple(map(int, re.search(r"in (\d+) buckets, (\d+) bytes at rest", line).groups())) for line in lines[:2]]

    return shardproof.run_threads(1, body)[0]


def test_buckets_have_the_size_the_number_and_the_places_that_are_asked_for():
    sizes = [p.numel() * 4 for p in Block(16).parameters()]  # 64, 64, 2048, 128, 2048, 64
    for count in (1, 2, 3, 6):
        assert [n for n, _ in buckets_of(bucket_count=count)] == [min(count, 4), count]
    assert buckets_of(bucket_count=20)[1][0] == len(sizes)
    assert buckets_of(bucket_bytes_max=1024)[1][0] == 5  # a larger parameter has a bucket of its own
    assert buckets_of(bucket_bytes_max=2112)[1][0] == 4
    assert buckets_of(bucket_multiple=4096) == [(1, 4096 * 4), (1, 4096 * 4)]
    for alignment in (64, 512, 4096):
        end = 0
        for size in sizes:
            end = -(-end // alignment) * alignment + size
        assert buckets_of(alignment_bytes=alignment)[1] == (1, end)


def test_a_module_that_two_selectors_choose_is_one_unit_with_the_options_of_the_first():
    model = Net()
    units, _ = select_units(model, [shardproof.Unit("blocks.1", reshard_after_forward=False), Block])
    found = [(unit.modules, unit.reshard_after_forward) for unit in units]
    assert found == [([model.blocks[1]], False), *(([block], None) for block in model.blocks if block is not model.blocks[1])]


def test_the_second_bucket_trains_when_the_first_is_frozen():
    base = Net()
    for frozen in ("norm", "up", "down"):
        for block in base.blocks:
            block.requires_grad_(True)
            getattr(block, frozen).requires_grad_(False)

        def body(comm):
            model = copy.deepcopy(base)
            sharded = shardproof.fully_shard(model, comm, units=[Block], bucket_count=3, alignment_bytes=64)
            optimizer = shardproof.adamw(sharded, lr=0.01)
            for step in range(2):
                loss_of(model, batch(2 * step + comm.rank)).backward()
                norm = sharded.clip_gradients(0.5)
                optimizer.step()
            return sharded.gather(), norm, {name: optimizer.updates(name) for name in sharded.gather_main_parameters()}

        _, expected = train_plain(
            base, lambda p: torch.optim.AdamW(p, lr=0.01), steps=2, world=2, norm_max=0.5  # noqa: B023
        )
        for values, norm, updates in shardproof.run_threads(2, body):
            for name, value in expected.named_parameters():
                assert torch.allclose(values[name], value, rtol=1e-5, atol=1e-6), (frozen, name)
                assert updates[name] == (2 if value.requires_grad else 0), (frozen, name)
                if not value.requires_grad:
                    assert torch.equal(values[name], base.get_parameter(name)), (frozen, name)


@pytest.mark.parametrize("order", [1, 2, float("inf")])
def test_norms_and_clipping_of_each_order_are_those_of_pytorch(order):
    base = Net()

    def body(comm):
        model = copy.deepcopy(base)
        sharded = shardproof.fully_shard(model, comm, units=[Block])
        loss_of(model, batch(0)).backward()
        norms = sharded.gradient_norm(order), sharded.clip_gradients(0.3, order)
        gradients = sharded.gather_gradients()
        sharded.skip_step()
        return norms, gradients

    plain = copy.deepcopy(base)
    loss_of(plain, batch(0)).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.3, norm_type=order).item()
    for norms, gradients in shardproof.run_threads(3, body):
        assert norms == (pytest.approx(expected, rel=1e-6),) * 2
        for name, value in plain.named_parameters():
            assert torch.allclose(gradients[name], value.grad, rtol=1e-6), name


def test_gradients_are_divided_are_finite_or_are_left_out():
    base = Net()

    def body(comm):
        model = copy.deepcopy(base)
        sharded = shardproof.fully_shard(model, comm, units=[Block], check_gradients=False)
        optimizer = shardproof.torch_optimizer(torch.optim.SGD, sharded, lr=0.1)
        loss_of(model, batch(0)).backward()
        assert sharded.gradients_are_finite()
        sharded.divide_gradients(3)
        whole = sharded.gather_gradients()
        sharded.skip_step()
        assert sharded.step == 1
        assert_same_bits(sharded.gather(), dict(base.named_parameters()))
        value = loss_of(model, batch(0)) * (float("inf") if comm.rank == 1 else 1.0)
        value.backward()
        assert not sharded.gradients_are_finite()
        sharded.skip_step()
        loss_of(model, batch(0)).backward()
        optimizer.step()
        return whole, sharded.gather()

    plain = copy.deepcopy(base)
    loss_of(plain, batch(0)).backward()
    gradients = {name: p.grad / 3 for name, p in plain.named_parameters()}
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for whole, after in shardproof.run_threads(2, body):
        for name, value in gradients.items():
            assert torch.equal(whole[name], value), name
        assert_same_bits(after, dict(plain.named_parameters()))


def test_no_sync_within_no_sync_is_restored_once_the_outer_one_ends():
    terms = list(drawn(2, 64)), list(drawn(2, 64, seed=1)), list(drawn(2, 64, seed=2)), list(drawn(2, 64, seed=3))

    def body(comm):
        sharded = shardproof.fully_shard(Given(64), comm, strategy="zero2")
        sharded.set_last_microbatch(False)
        with sharded.no_sync():
            sharded(terms[0][comm.rank]).backward()
            with sharded.no_sync():
                sharded(terms[1][comm.rank]).backward()
            assert not sharded.native.gradient_sync
            sharded(terms[2][comm.rank]).backward()
        assert sharded.native.gradient_sync
        sharded.set_gradient_sync(False)
        with sharded.no_sync():
            pass
        assert not sharded.native.gradient_sync  # as it was, and not as it usually is
        with pytest.raises(ZeroDivisionError):
            with sharded.no_sync():
                raise ZeroDivisionError
        assert not sharded.native.gradient_sync
        sharded.set_gradient_sync(True)
        sharded.set_last_microbatch(True)
        sharded(terms[3][comm.rank]).backward()
        return sharded.gather_gradients()["weight"]

    ranks = [[each[rank] for each in terms] for rank in range(2)]
    whole = [((a + b) + c) + d for a, b, c, d in ranks]
    for got in shardproof.run_threads(2, body):
        assert torch.equal(got, (whole[0] + whole[1]) / 2)


@pytest.mark.parametrize("shard_dim", [1, lambda name, parameter: -1])
def test_an_optimizer_of_pytorch_has_one_tensor_of_each_parameter_along_whichever_dim_it_is_cut(shard_dim):
    base = Net()

    def body(comm):
        options = dict(units=[Block], granularity="row")
        sharded = shardproof.fully_shard(copy.deepcopy(base), comm, shard_dim=shard_dim, **options)
        optimizer = shardproof.torch_optimizer(torch.optim.SGD, sharded, lr=0.1)
        held = [piece.name for piece in sharded.main_parameters()]
        assert held.count("inp.weight") == base.inp.weight.shape[0]  # runs of columns
        assert len(optimizer.param_groups[0]["params"]) == len(set(held))
        loss_of(sharded, batch(comm.rank)).backward()
        optimizer.step()
        for says, message in ((7, "dim 7 for parameter inp.weight"), ("one", "returned 'one' for parameter inp.weight")):
            with pytest.raises(shardproof.Error, match=message):
                shardproof.fully_shard(copy.deepcopy(base), comm, shard_dim=lambda *_: says, **options)
        return sharded.gather()

    _, expected = train_plain(base, lambda p: torch.optim.SGD(p, lr=0.1), steps=1, world=2)
    for values in shardproof.run_threads(2, body):
        assert_same_bits(values, dict(expected.named_parameters()))


def test_main_parameters_that_are_written_by_hand_reach_the_forward():
    base = Net()

    def body(comm):
        sharded = shardproof.fully_shard(copy.deepcopy(base), comm, units=[Block])
        sharded.main_parameters_will_change()
        for piece in sharded.main_parameters():
            piece.data.mul_(2)
        sharded.main_parameters_changed()
        with torch.no_grad():
            return sharded(batch(0)[0]), sharded.gather()

    doubled = copy.deepcopy(base)
    with torch.no_grad():
        for parameter in doubled.parameters():
            parameter.mul_(2)
    for result, values in shardproof.run_threads(2, body):
        assert torch.equal(result, doubled(batch(0)[0]))
        assert_same_bits(values, dict(doubled.named_parameters()))


def test_a_state_dict_that_lacks_names_is_refused_unless_it_may():
    base = Net()
    other = {name: value + 1 for name, value in base.state_dict().items()}
    part = {name: value for name, value in other.items() if name.startswith("blocks.1")}

    def body(comm):
        sharded = shardproof.fully_shard(copy.deepcopy(base), comm, units=[Block])
        with pytest.raises(shardproof.Error, match="(?i)missing"):
            sharded.load_state_dict(part)
        sharded.load_state_dict({**part, "stranger": torch.ones(1)}, strict=False)
        return sharded.gather()

    for values in shardproof.run_threads(2, body):
        assert_same_bits(values, {**dict(base.named_parameters()), **part})


def test_canonical_sums_do_not_depend_on_the_number_of_ranks():
    terms = list(drawn(4, 64))

    def whole(world):
        def body(comm):
            sharded = shardproof.fully_shard(Given(64), comm, numerics="canonical", gradient_divide=1)
            for each in sharded.microbatches(terms[comm.rank :: world]):
                sharded(each).backward()
            return sharded.gather_gradients()["weight"]

        return shardproof.run_threads(world, body)[0]

    assert torch.equal(whole(1), whole(4)) and torch.equal(whole(1), whole(2))
    grid = [torch.round(each.double() * 2**44) / 2**44 for each in terms]
    assert torch.equal(whole(4), sum(grid).float())


def test_the_position_of_the_first_sample_chooses_its_part_of_the_mask():
    x = torch.ones(6, 50)

    def mask(p, first, count):
        def body(comm):
            model = nn.Sequential(nn.Linear(50, 50), shardproof.Dropout(p))
            with torch.no_grad():
                model[0].weight.copy_(torch.eye(50))
                model[0].bias.zero_()
            sharded = shardproof.fully_shard(model, comm)
            shardproof.random_stream(7, first_sample=first)
            with torch.no_grad():
                return sharded(x[first : first + count])

        return shardproof.run_threads(1, body)[0]

    whole = mask(0.25, 0, 6)
    assert set(whole.unique().tolist()) == {0.0, (torch.tensor(1.0) / 0.75).item()}
    assert torch.equal(mask(0.25, 2, 3), whole[2:5])
    assert 0.6 < (mask(0.25, 0, 6) != 0).float().mean() < 0.9 and (mask(0.75, 0, 6) != 0).float().mean() < 0.4
