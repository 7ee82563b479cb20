"""What each process does in test_process_groups.py: the program, its scenario, and its arguments."""

import datetime
import os
import sys
import warnings
from unittest import mock

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, os.pardir, os.pardir, "ci", "tests")]

import torch  # noqa: E402
import torch._dynamo  # noqa: E402, F401, which hooks and optimizers import when they are first called
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint.state_dict  # noqa: E402, F401
import torch.distributed.fsdp  # noqa: E402, F401

import disagreeing  # noqa: E402
import peer_ranks  # noqa: E402
import shardproof  # noqa: E402
import shardproof.fsdp  # noqa: E402
from models import Block, Net, assert_same_bits, batch, loss_of, train_plain  # noqa: E402


def net():
    with shardproof.seeded(0):
        return Net()


def train():
    """The default process group; the bits of plain PyTorch."""
    model = net()
    sharded = shardproof.fully_shard(model, strategy="zero3", units=[Block])
    optimizer = shardproof.torch_optimizer(torch.optim.AdamW, sharded, lr=0.01)
    for step in range(3):
        loss_of(model, batch(step * dist.get_world_size() + dist.get_rank())).backward()
        optimizer.step()
    _, expected = train_plain(net(), lambda p: torch.optim.AdamW(p, lr=0.01), steps=3, world=dist.get_world_size())
    assert_same_bits(sharded.gather(), dict(expected.named_parameters()))


def programs(*names):
    """These programs of FSDP2's users compute the same with either library."""
    import fsdp_kit
    import fsdp_models
    import fsdp_training

    warnings.simplefilter("ignore")
    for module in (fsdp_training, fsdp_models):
        for name in names:
            if hasattr(module, name):
                fsdp_kit.compare(getattr(module, name))


def rows():
    """After training, each rank holds of each parameter the rows that FSDP2 leaves it."""
    from torch.distributed.fsdp import fully_shard

    theirs = net()
    for block in theirs.blocks:
        fully_shard(block)
    fully_shard(theirs)
    ours = net()
    sharded = shardproof.fully_shard(ours, units=[Block], granularity="row")
    for model, optimizer in (
        (theirs, torch.optim.AdamW(theirs.parameters(), lr=0.01)),
        (ours, shardproof.torch_optimizer(torch.optim.AdamW, sharded, lr=0.01)),
    ):
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, batch(step * dist.get_world_size() + dist.get_rank())).backward()
            optimizer.step()
    held = {piece.name: piece for piece in sharded.main_parameters()}
    for name, parameter in theirs.named_parameters():
        local = parameter.to_local().detach()
        assert (local.numel() > 0) == (name in held), name
        if name in held:
            torch.testing.assert_close(held[name].data.view_as(local), local, rtol=1e-4, atol=1e-6)


def hsdp_mesh():
    mesh = dist.device_mesh.init_device_mesh(
        "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp_replicate", "dp_shard")
    )
    model = net()
    sharded = shardproof.fully_shard(model, mesh=mesh, strategy="hsdp", units=[Block])
    loss_of(model, batch(dist.get_rank())).backward()
    shardproof.sgd(sharded, lr=0.1).step()
    _, expected = train_plain(net(), lambda p: torch.optim.SGD(p, lr=0.1), steps=1, world=dist.get_world_size())
    for name, value in expected.named_parameters():
        assert torch.allclose(sharded.gather()[name], value, atol=1e-6)


def part_of_a_mesh():
    """Ranks of each part train a model of their own."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("models", "dp_shard"))
    model, own = net(), dist.get_rank() // 2
    sharded = shardproof.fully_shard(model, mesh=mesh["dp_shard"], units=[Block])
    loss_of(model, batch(2 * own + sharded.rank)).backward()
    gradients = sharded.gather_gradients()
    expected = net()
    (sum(loss_of(expected, batch(2 * own + rank)) for rank in range(2)) / 2).backward()
    for name, parameter in expected.named_parameters():
        assert torch.allclose(gradients[name], parameter.grad, atol=1e-6), name


def groups_made():
    """Global ranks of each group that this rank is in and that the library made."""
    from torch.distributed import distributed_c10d

    names = distributed_c10d._world.pg_names
    return sorted(
        dist.get_process_group_ranks(group) for group, name in names.items() if name.startswith("shardproof/")
    )


def trained_on(comm, mesh, strategy):
    model = net()
    sharded = shardproof.fully_shard(model, comm, mesh=mesh, strategy=strategy, units=[Block])
    optimizer = shardproof.adamw(sharded, lr=0.01)
    for step in range(2):
        loss_of(model, batch(step * comm.size + comm.rank)).backward()
        optimizer.step()
    return sharded.gather()


def made_groups():
    """Groups along two axes are process groups, and change no bit."""
    dist.new_group([0, 1])  # ranks are in different numbers of groups from now on
    with_messages = trained_on(shardproof.comm_of(), "dp_replicate=2,dp_shard=2", "hsdp")
    assert groups_made() == []
    with_groups = trained_on(shardproof.comm_of(make_groups=True), "dp_replicate=2,dp_shard=2", "hsdp")
    assert_same_bits(with_groups, with_messages)
    rank = dist.get_rank()
    along_shard, along_replicate = [rank - rank % 2, rank - rank % 2 + 1], [rank % 2, rank % 2 + 2]
    assert along_shard in groups_made() and along_replicate in groups_made(), groups_made()


def made_groups_of_a_part():
    """Ranks of the part have other numbers in the job."""
    part = dist.new_group([1, 2, 3, 4])
    rank = dist.get_rank() - 1
    if rank < 0:
        return
    comm = shardproof.comm_of(part, make_groups=True)
    trained_on(comm, "dp_replicate=1,dp_shard=4", "hsdp")
    assert groups_made() == []  # those of all ranks are there, and a rank alone needs none
    trained_on(comm, "dp_replicate=2,dp_shard=2", "hsdp")
    first, second = rank - rank % 2 + 1, rank % 2 + 1
    assert groups_made() == sorted([[first, first + 1], [second, second + 2]]), groups_made()


def disagree(name):
    disagreeing.run(name, shardproof.comm_of())


def apart(name):
    try:
        disagreeing.APART[name](shardproof.comm_of())
    except RuntimeError as error:
        print(error, flush=True)
        os._exit(0)  # as who does not catch it
    raise AssertionError(f"rank {dist.get_rank()} was told nothing")


def refused_groups():
    def refused(call, *says):
        try:
            call()
        except shardproof.Error as error:
            assert all(each in str(error) for each in says), error
            return
        raise AssertionError("nothing was refused")

    unreachable = RuntimeError("connect [127.0.1.1]:31337: Connection refused")
    from shardproof.ranks import _group_within as make

    with mock.patch("torch.distributed.distributed_c10d._new_process_group_helper", side_effect=unreachable):
        refused(
            lambda: make(dist.group.WORLD, [0, 1], "gloo", "dp_shard"),
            "Connection refused", "/dp_shard/", "GLOO_SOCKET_IFNAME",
        )  # fmt: skip


def as_users_begin():
    """A group that takes tensors of the GPU alone, as NCCL's, with a timeout and a device of its own; models come and go."""
    from torch.distributed import distributed_c10d

    world, given = dist.group.WORLD, distributed_c10d._world.pg_names.copy()
    world.bound_device_id = torch.device("cuda", dist.get_rank())
    assert torch.device("cpu") not in world._device_types
    bits, made = [], []
    for mesh, strategy in 2 * [("dp_replicate=2,dp_shard=2", "hsdp"), ("dp_shard=4", "zero3")]:
        bits.append(trained_on(shardproof.comm_of(), mesh, strategy))
        made.append(groups_made())
    assert_same_bits(bits[0], bits[2])
    rank = dist.get_rank()
    # One for tensors of the CPU, and one for each axis of some ranks.
    assert made[0] == sorted([[0, 1, 2, 3], [rank - rank % 2, rank - rank % 2 + 1], [rank % 2, rank % 2 + 2]]), made[0]
    assert made[1:] == 3 * made[:1], made
    assert world.bound_device_id is not None
    for group in set(distributed_c10d._world.pg_names) - set(given):
        timeout = group._get_backend(torch.device("cpu")).options._timeout
        assert timeout.total_seconds() == 417, (distributed_c10d._world.pg_names[group], timeout)
    # The last has ranks in another order along both of its axes than in the job.
    for mesh, strategy in [("dp_shard=4", "zero3"), ("dp_replicate=2,dp_shard=2", "hzero2")]:
        on_threads = shardproof.run_threads(4, lambda comm: trained_on(comm, mesh, strategy))  # noqa: B023
        assert_same_bits(trained_on(shardproof.comm_of(), mesh, strategy), on_threads[0])


def nccl():
    """One GPU a rank. Groups along the axes are process groups, because NCCL has no tags."""
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    group = dist.new_group(backend="cpu:gloo,cuda:nccl")
    model = net().to(device)
    sharded = shardproof.fully_shard(model, group, mesh="dp_replicate=2,dp_shard=2", strategy="hsdp", units=[Block])
    loss_of(model, [part.to(device) for part in batch(dist.get_rank())]).backward()
    shardproof.sgd(sharded, lr=0.1).step()
    assert len(groups_made()) > 1, groups_made()
    _, expected = train_plain(net(), lambda p: torch.optim.SGD(p, lr=0.1), steps=1, world=dist.get_world_size())
    for name, value in expected.named_parameters():
        assert torch.allclose(sharded.gather()[name].cpu(), value, rtol=1e-4, atol=1e-6), name


def checkpoint(folder):
    """FSDP2 opens what we saved, and we open what FSDP2 saved."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    def theirs():
        model = net()
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def step_theirs(model, optimizer, number):
        optimizer.zero_grad()
        loss_of(model, batch(2 * number + dist.get_rank())).backward()
        optimizer.step()

    ours = net()
    sharded = shardproof.fully_shard(ours, units=[Block])
    optimizer = shardproof.adamw(sharded, lr=0.01)

    def step_ours(number):
        loss_of(ours, batch(2 * number + dist.get_rank())).backward()
        optimizer.step()

    step_ours(0)
    shardproof.save(os.path.join(folder, "ours"), sharded, optimizer, step=1)
    model, their_optimizer = theirs()
    model_state, optimizer_state = get_state_dict(model, their_optimizer)
    state = {"model": model_state, "optim": optimizer_state}
    dcp.load(state, checkpoint_id=os.path.join(folder, "ours"))
    set_state_dict(model, their_optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    whole = sharded.gather()
    for name, value in model.named_parameters():
        assert torch.equal(value.full_tensor(), whole[name]), name

    step_theirs(model, their_optimizer, 1)
    model_state, optimizer_state = get_state_dict(model, their_optimizer)
    dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=os.path.join(folder, "theirs"))
    shardproof.load(os.path.join(folder, "theirs"), sharded, optimizer)
    whole = sharded.gather()
    for name, value in model.named_parameters():
        assert torch.equal(value.full_tensor(), whole[name]), name
    assert optimizer.updates("inp.weight") == 2
    step_ours(2)
    step_theirs(model, their_optimizer, 2)
    whole = sharded.gather()
    for name, value in model.named_parameters():
        assert torch.allclose(value.full_tensor(), whole[name], rtol=1e-5, atol=1e-6), name


def dimensions_that_do_not_fit():
    """Each is an error on every rank before anything is sharded."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import DataParallelMeshDims
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh, other = (init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_shard", tp)) for tp in ("tp", "experts"))

    def refused(message, place=None, **dims):
        model = torch.nn.Linear(4, 4, bias=False)
        if place is not None:
            model.weight = torch.nn.Parameter(distribute_tensor(model.weight, *place))
        before = model.weight
        try:
            shardproof.fsdp.fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(**dims))
        except shardproof.Error as error:
            assert message in str(error), error
            assert model.weight is before and type(model) is torch.nn.Linear
            return
        raise AssertionError(f"nothing was refused: {message}")

    refused("the dimension 'dp', and the mesh ('dp_shard', 'tp'). Give a DeviceMesh with it", shard="dp")
    refused("has no dimension to shard over", replicate="dp_shard")
    refused("parameter weight is a plain tensor, and nothing says how it lies over 'tp'", shard="dp_shard")
    refused("Give fully_shard the mesh that the parameters are on", (other, [Replicate(), Replicate()]), shard="dp_shard")
    refused("weight is S(0) over 'dp_shard', which dp_mesh_dims has", (mesh, [Shard(0), Replicate()]), shard="dp_shard")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "as_users_begin":
        gloo = lambda store, rank, size, timeout: dist.ProcessGroupGloo(store, rank, size, timeout)  # noqa: E731
        dist.Backend.register_backend("for_gpus", gloo, devices=["cuda"])
        store = peer_ranks.join("for_gpus", timeout=datetime.timedelta(seconds=417))
    else:
        store = peer_ranks.join()
    globals()[sys.argv[1]](*sys.argv[2:])
    peer_ranks.leave(store)
