"""Programs as users of FSDP2 write them, about models, their parameters and their state. Each runs with either library."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from fsdp_kit import given, gradients, net, sharded, train, values, whole
from models import Net, batch, loss_of


def parameters_and_gradients_by_hand(lib):
    model = sharded(lib)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
        model.out.bias.fill_(0.25)
    first = loss_of(model, given(0))
    first.backward()
    for parameter in model.parameters():
        parameter.grad.mul_(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.5)
    return first.item(), loss_of(model, given(1)).item(), values(model)


def averages(lib):
    model = sharded(lib)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(3):
        train(model, optimizer, 1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                kept[name].lerp_(parameter.detach(), 0.1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(kept[name])
        value = loss_of(model, given(5)).item()
    return value, {name: whole(value) for name, value in kept.items()}


def unused_parameters(lib):
    """What a step does not use has no gradient, and weight decay leaves it alone."""
    model = net()
    model.spare = nn.Linear(4, 4)
    nn.init.ones_(model.spare.weight)
    nn.init.ones_(model.spare.bias)
    model = sharded(lib, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
    train(model, optimizer, 2)
    assert model.spare.weight.grad is None
    return values(model)


def frozen_parameters(lib):
    model = net()
    model.inp.requires_grad_(False)
    model.blocks[1].up.requires_grad_(False)
    model = sharded(lib, model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    return train(model, optimizer), values(model)


def thawed_between_steps(lib):
    model = net()
    model.blocks[1].requires_grad_(False)
    model = sharded(lib, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = train(model, optimizer, 1)
    for parameter in model.blocks[1].parameters():
        parameter.requires_grad_(True)
    return losses, train(model, optimizer, 2), values(model)


def a_list_of_modules_is_a_unit(lib):
    model = net()
    lib.fully_shard(model.blocks[0])
    lib.fully_shard([model.blocks[1], model.blocks[2]])
    lib.fully_shard(model)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1)), values(model)


def a_method_that_is_a_forward(lib):
    model = net()
    model.encode = lambda x: model.blocks[0](model.inp(x))
    model = sharded(lib, model)
    lib.register_fsdp_forward_method(model, "encode")
    first = model.encode(given(0)[0])
    first.sum().backward()
    return first, {name: g for name, g in gradients(model).items() if name.startswith(("inp", "blocks.0"))}


def shards_from_the_meta_device(lib):
    with torch.device("meta"):
        model = Net()
    model = sharded(lib, model)
    assert all(p.is_meta and isinstance(p, DTensor) for p in model.parameters())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.distributed.tensor.distribute_tensor(
                torch.linspace(-0.5, 0.5, parameter.numel()).view(parameter.shape) * (1 + i % 3),
                parameter.device_mesh, parameter.placements, src_data_rank=None,
            ))
    return train(model, torch.optim.AdamW(model.parameters(), lr=0.01)), values(model)


def a_state_dict_is_assigned_to_the_meta_device(lib):
    source = sharded(lib)
    state = source.state_dict()
    with torch.device("meta"):
        model = Net()
    model = sharded(lib, model)
    for name, value in state.items():
        model.load_state_dict({name: value.clone()}, assign=True, strict=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = train(model, optimizer)
    assert all(p.device.type == "cpu" for p in model.state_dict().values())
    return losses, values(model)


def state_dicts(lib):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    results = []
    for full, offload in ((False, False), (True, False), (True, True)):
        options = StateDictOptions(full_state_dict=full, cpu_offload=offload)
        model = sharded(lib)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        train(model, optimizer, 2)
        weights, state = get_state_dict(model, optimizer, options=options)
        shared = {name: whole(value).clone() for name, value in weights.items()}
        other = sharded(lib)
        again = torch.optim.AdamW(other.parameters(), lr=0.5)
        if offload:  # rank 0 alone has it
            box = [weights, state]
            dist.broadcast_object_list(box)
            weights, state = box
        options = StateDictOptions(full_state_dict=full)
        set_state_dict(other, again, model_state_dict=weights, optim_state_dict=state, options=options)
        results.append((shared, train(other, again, 2), values(other)))
    return results


def a_state_dict_is_assigned(lib):
    model, other = sharded(lib), sharded(lib)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    other.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    return train(other, optimizer), values(other)


def recomputed_blocks(lib):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = net()
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
    model = sharded(lib, model)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1)), values(model)


def a_part_of_a_unit_is_recomputed(lib):
    from torch.utils.checkpoint import checkpoint

    model = net()
    for block in model.blocks:
        block.forward = lambda x, b=block: x + b.down(torch.relu(checkpoint(b.up, b.norm(x), use_reentrant=False)))
    model = sharded(lib, model)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1)), values(model)


def evaluation_between_steps(lib):
    model = sharded(lib)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen = []
    for step in range(2):
        seen += train(model, optimizer, 1)
        model.eval()
        with torch.no_grad():
            seen.append(loss_of(model, given(9)).item())
        model.train()
    return seen, values(model)


def whole_parameters_by_hand(lib):
    model = sharded(lib)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    for part in (model, *model.blocks):
        part.unshard()
    seen = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert not any(isinstance(value, DTensor) for value in seen.values())
    for part in (model, *model.blocks):
        part.reshard()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    return seen


def tied_parameters_of_the_root(lib):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(7, 6)
            self.blocks = nn.ModuleList([nn.Linear(6, 6)])
            self.head = nn.Linear(6, 7, bias=False)
            self.head.weight = self.table.weight

        def forward(self, x):
            return self.head(self.blocks[0](self.table(x)))

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = sharded(lib, Tied())
    assert model.head.weight is model.table.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.arange(7) % (2 + dist.get_rank())).square().mean().backward()
        optimizer.step()
    return values(model)


def an_averaged_model(lib):
    model = sharded(lib)
    averaged = torch.optim.swa_utils.AveragedModel(net(), multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    sharded(lib, averaged.module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        train(model, optimizer, 1)
        averaged.update_parameters(model)
    return values(averaged.module), averaged(given(7)[0]).sum().item()


def compiled_blocks(lib):
    torch._dynamo.reset()
    model = net(blocks=10)
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    model = sharded(lib, model)
    with torch._dynamo.config.patch(recompile_limit=4, fail_on_recompile_limit_hit=True):
        return train(model, torch.optim.SGD(model.parameters(), lr=0.1)), values(model)


def blocks_that_are_compiled_after_wrapping(lib):
    torch._dynamo.reset()
    model = sharded(lib, net(blocks=10))
    for block in model.blocks:
        block.compile(backend="aot_eager")
    with torch._dynamo.config.patch(recompile_limit=4, fail_on_recompile_limit_hit=True):
        return train(model, torch.optim.SGD(model.parameters(), lr=0.1)), values(model)


def a_root_without_parameters(lib):
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = net()

        def forward(self, x):
            return self.body(x)

    model = Root()
    for part in (*model.body.blocks, model.body, model):
        lib.fully_shard(part)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1)), values(model)


def checkpoints_of_pytorch(lib):
    import shutil
    import tempfile

    import torch.distributed.checkpoint as dcp

    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    (folder,) = box
    model = sharded(lib)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, 2)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    other = sharded(lib)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state["model"])
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    again = torch.optim.AdamW(other.parameters(), lr=0.5)
    again.load_state_dict(optimizer.state_dict())
    return train(other, again, 2), values(other)


def a_cast_after_wrapping(lib):
    model = sharded(lib)
    model.bfloat16()
    result = model(given(0)[0].bfloat16())
    result.float().square().mean().backward()
    return {name: (p.dtype, p.grad.dtype) for name, p in model.named_parameters()}, gradients(model)


def initialisation_of_shards(lib):
    model = sharded(lib)
    for i, parameter in enumerate(model.parameters()):
        nn.init.constant_(parameter, 0.1 + 0.01 * i)
    model.out.bias.data.zero_()
    return loss_of(model, given(0)).item(), values(model)


def replicas_of_shards(lib):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("replicate", "shard"))
    model = sharded(lib, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return train(model, optimizer), values(model), [str(p.placements) for p in model.parameters()]


def replicas_alone(lib):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    model = sharded(lib, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        for k in range(2):
            model.set_requires_all_reduce(k == 1)
            (loss_of(model, given(2 * step + k)) / 2).backward()
            assert k == 1 or model.inp.weight.grad is None
        optimizer.step()
        optimizer.zero_grad()
    return values(model), [str(p.placements) for p in model.parameters()]


def ignored_parameters(lib):
    model = net()
    ignored = {model.out.weight, model.out.bias}
    for block in model.blocks:
        lib.fully_shard(block)
    lib.fully_shard(model, ignored_params=ignored)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, given(step)).backward()
        for parameter in ignored:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
    return values(model)


def buffers_that_change(lib):
    model = net()
    model.blocks[0].norm = nn.BatchNorm1d(12)
    model = sharded(lib, model)
    losses = train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return losses, values(model), {name: value.clone() for name, value in model.named_buffers()}


def units_that_run_twice(lib):
    class Twice(Net):
        def forward(self, x):
            x = self.inp(x)
            for block in [*self.blocks, *self.blocks]:
                x = block(x)
            return self.out(x)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = sharded(lib, Twice())
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1)), values(model)


def attributes_of_parameters(lib):
    model = net()
    model.inp.weight.spared = True
    model = sharded(lib, model)
    spared = [name for name, p in model.named_parameters() if getattr(p, "spared", False)]
    return len(spared) if lib.__name__ == "shardproof.fsdp" else 1, values(model)


def other_dims(lib):
    """The largest dim, where a rank's part divides; FSDP2 asks for that."""
    ranks = dist.get_world_size()

    def placement(parameter):
        dim = max(range(parameter.dim()), key=lambda d: parameter.shape[d])
        return Shard(dim) if parameter.shape[dim] % ranks == 0 else None

    model = net()
    for part in (*model.blocks, model):
        lib.fully_shard(part, shard_placement_fn=placement)
    placed = [str(p.placements) for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = train(model, optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    other = net()
    for part in (*other.blocks, other):
        lib.fully_shard(part, shard_placement_fn=placement)
    other.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    return placed, losses, gradients(model), values(model), values(other), loss_of(other, given(7)).item()


def other_dims_of_recomputed_blocks(lib):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = net()
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
    ranks = dist.get_world_size()
    placement = lambda p: Shard(1) if p.dim() == 2 and p.shape[1] % ranks == 0 else None  # noqa: E731
    for part in (*model.blocks, model):
        lib.fully_shard(part, shard_placement_fn=placement)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1)), values(model)


def tensor_parallelism_of_pytorch(lib):
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    tp = 2 if dist.get_world_size() % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))

    def made():
        model = net()
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            lib.fully_shard(block, mesh=mesh["dp"])
        return lib.fully_shard(model, mesh=mesh["dp"])

    model, losses = made(), []
    optimizer = torch.optim.AdamW(model.blocks.parameters(), lr=0.01, foreach=False)
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, batch(step * mesh["dp"].size() + mesh["dp"].get_local_rank()))
        loss.backward()
        if lib.__name__ == "shardproof.fsdp":
            norm = lib.clip_grad_norm_(model.parameters(), 1e9)
        else:  # whose clip_grad_norm_ does not take parameters of several meshes
            norm = torch.linalg.vector_norm(torch.stack([whole(p.grad).norm() for p in model.parameters()]))
        losses.append(norm.item())
        optimizer.step()
        losses.append(loss.item())
    other = made()
    set_model_state_dict(other, get_model_state_dict(model))
    placed = [str(p.placements) for p in model.parameters()]
    return placed, losses, gradients(model), values(model), values(other)


def data_parallelism_as_dimensions_of_one_mesh(lib):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_module, distribute_tensor

    def trained(names, **dims):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        data = [Replicate() if name == "tp" else Shard(0) for name in names]
        columns = {"up": Shard(0), "down": Shard(1)}  # weights of which dim the ranks of tensor parallelism share

        def place(name, part, mesh):
            for key, value in part._parameters.items():
                tp = columns.get(name.split(".")[-1], Replicate()) if key == "weight" or name.endswith("up") else Replicate()
                placements = [tp if each == "tp" else Replicate() for each in names]
                part._parameters[key] = nn.Parameter(distribute_tensor(value, mesh, placements))

        def loss(model, given):
            x, y = given
            placed = model(DTensor.from_local(x, mesh, data)).redistribute(mesh, data)
            return (placed.to_local() - y).square().mean()

        model = distribute_module(net(), mesh, place)
        sharded(lib, model, mesh=mesh, dp_mesh_dims=lib.DataParallelMeshDims(**dims))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
        number = mesh.get_coordinate()[0] if "tp" in names else dist.get_rank()
        losses = []
        for step in range(3):
            optimizer.zero_grad()
            losses.append(loss(model, batch(4 * step + number)))
            losses[-1].backward()
            optimizer.step()
        placed = [str(p.placements) for p in model.parameters()]
        return placed, torch.stack(losses).detach(), gradients(model), values(model)

    return (
        trained(("dp_shard", "tp"), shard="dp_shard"),
        trained(("dp_replicate", "dp_shard"), replicate="dp_replicate", shard="dp_shard"),
        trained(("dp_shard", "cp"), shard=("dp_shard", "cp")),
    )
