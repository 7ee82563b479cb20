"""What rank 1 does otherwise than the other ranks, and what every rank has to be told: for threads, for Gloo and for MPI."""

import sys

import torch
from models import Block, Net, batch, loss_of
from torch import nn

import shardproof


def trained(comm, steps=2, optimizer=shardproof.sgd, change=None, **options):
    """Trains; `change(sharded, optimizer, step)` runs on rank 1 alone, before each step's backward."""
    model = Net()
    sharded = shardproof.fully_shard(model, comm, units=[Block], **options)
    made = optimizer(sharded)
    for step in range(steps):
        if change is not None and comm.rank == 1:
            change(sharded, made, step)
        loss_of(model, batch(step)).backward()
        made.step()
    loss_of(model, batch(9)).backward()  # whatever the last step did shows in the next exchange


def microbatches(comm, counts=((1, 2), (2, 1)), **options):
    """How many microbatches each rank has, by step."""
    model = nn.Linear(4, 1, bias=False)
    sharded = shardproof.fully_shard(model, comm, **options)
    sharded.write_parameters({"weight": torch.zeros(1, 4)})
    optimizer = shardproof.sgd(sharded, lr=0.1)
    for of_step in counts:
        for _ in sharded.microbatches(range(of_step[comm.rank % 2])):
            (model(torch.ones(1, 4)) - 1).square().sum().backward()
        optimizer.step()
    return sharded.gather_main_parameter("weight").flatten()[0].item()


def option(name, value):
    return lambda comm: shardproof.fully_shard(Net(), comm, units=[Block], **({name: value} if comm.rank == 1 else {}))


def of_model(change):
    def run(comm):
        model = Net()
        if comm.rank == 1:
            model = change(model) or model
        shardproof.fully_shard(model, comm, units=[Block])

    return run


def with_other_order(model):
    model.inp = nn.Linear(5, 12)
    modules = dict(model._modules)
    model._modules.clear()
    model._modules.update(reversed(modules.items()))


def tied(model):
    model.blocks[1].up.weight = model.blocks[0].up.weight


def freeze(sharded, optimizer, step):
    sharded.module.blocks[1].up.weight.requires_grad_(False)


def freeze_unit(sharded, optimizer, step):
    sharded.module.blocks[1].requires_grad_(False)


def sgd_at(rates):
    return lambda sharded: shardproof.sgd(sharded, lr=rates[min(sharded.rank, 1)])


def torch_at(rates):
    return lambda sharded: shardproof.torch_optimizer(torch.optim.SGD, sharded, lr=rates[min(sharded.rank, 1)])


def clipped(comm):
    model = Net()
    sharded = shardproof.fully_shard(model, comm, units=[Block])
    loss_of(model, batch(0)).backward()
    sharded.clip_gradients(2.0 if comm.rank == 1 else 1.0)
    shardproof.sgd(sharded).step()
    loss_of(model, batch(1)).backward()


def run_apart(units, left_out):
    """Ranks run forwards of equal units that the others do not: of a batch that is left out, or to evaluate alone."""

    def run(comm):
        with shardproof.seeded(0):
            model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(units)])
        sharded = shardproof.fully_shard(model, comm, units=[nn.Linear])
        optimizer = shardproof.sgd(sharded)
        for step in range(4):
            loss = model(torch.ones(2, 16)).square().mean()
            if left_out and (step, comm.rank) in ((1, 1), (2, 0)):
                continue
            loss.backward()
            optimizer.step()
            if not left_out and step == comm.rank:
                with torch.no_grad():
                    model(torch.ones(2, 16))

    return run


# Of each: what runs, and words of the error, in this order.
CASES = {
    "strategy": (option("strategy", "zero2"), ["option strategy", "zero3", "rank 0", "zero2", "rank 1"]),
    "numerics": (option("numerics", "fast"), ["option numerics", "'ordered' on rank 0", "'fast' on rank 1"]),
    "divide": (option("gradient_divide", 7.0), ["option gradient_divide", "'0' on rank 0", "'7' on rank 1"]),
    "bucket_count": (option("bucket_count", 2), ["option bucket_count", "'0' on rank 0", "'2' on rank 1"]),
    "granularity": (option("granularity", "tensor"), ["option granularity", "'element' on rank 0", "'tensor' on rank 1"]),
    "precision": (
        option("precision", shardproof.Precision(compute=torch.bfloat16)),
        ["option precision", "compute open", "rank 0", "compute BFloat16", "rank 1"],
    ),
    "units": (
        lambda comm: shardproof.fully_shard(Net(), comm, units=[Block, nn.LayerNorm] if comm.rank == 1 else [Block]),
        ["list of units", "'the root blocks.0 blocks.1", "rank 0", "blocks.0 blocks.0.norm", "rank 1"],
    ),
    "recompute": (option("recompute", "blocks.1"), ["unit 'blocks.1'", "rank 0", "recompute", "rank 1"]),
    "keep_whole": (option("keep_whole_numel_max", 20), ["option keep_whole_numel_max", "'0' on rank 0", "'20' on rank 1"]),
    "a bad option": (option("bucket_multiple", 0), ["option bucket_multiple", "'1' on rank 0", "'0' on rank 1"]),
    "order": (of_model(with_other_order), ["inp.weight", "number 1", "rank 0", "number 3", "rank 1"]),
    "shape": (of_model(lambda model: Net(width=10)), ["parameter inp.weight", "[12, 5]", "rank 0", "[10, 5]", "rank 1"]),
    "dtype": (of_model(lambda model: model.double()), ["parameter", "Float", "rank 0", "Double", "rank 1"]),
    "frozen": (
        of_model(lambda model: model.out.requires_grad_(False) and None),
        ["parameter out.weight", "rank 0", "frozen", "rank 1"],
    ),
    "tied": (
        of_model(tied),
        ["name blocks.1.up.weight", "not there on rank 0", "tied to blocks.0.up.weight", "rank 1"],
    ),
    "a parameter more": (
        of_model(lambda model: model.register_parameter("more", nn.Parameter(torch.ones(3)))),
        ["parameter", "on rank 0", "rank 1"],
    ),
    "buffer": (
        of_model(lambda model: model.register_buffer("table", torch.ones(3))),
        ["buffer table", "not there on rank 0", "[3]", "rank 1"],
    ),
    "microbatches": (lambda comm: microbatches(comm), ["step 1", "reduction 1, the last", "step 1", "reduction 1"]),
    "later microbatches": (
        lambda comm: microbatches(comm, ((2, 2), (3, 2), (2, 3))),
        ["step 2", "reduction 2", "step 2", "reduction 2, the last"],
    ),
    "freeze": (
        lambda comm: trained(comm, change=freeze),
        ["blocks.1.up.weight"],
    ),
    "freeze a unit": (lambda comm: trained(comm, change=freeze_unit), ["blocks.1"]),
    "rate": (lambda comm: trained(comm, optimizer=sgd_at((0.1, 0.2))), ["step 2", "lr=0.1", "step 2", "lr=0.2"]),
    "rate of torch": (lambda comm: trained(comm, optimizer=torch_at((0.1, 0.2))), ["step 2", "lr=0.1", "step 2", "lr=0.2"]),
    "factor": (
        lambda comm: trained(comm, change=lambda sharded, optimizer, step: optimizer.set_lr_factor(0.5)),
        ["step 2", "lr_factor=1", "step 2", "lr_factor=0.5"],
    ),
    "rule": (
        lambda comm: trained(
            comm, optimizer=lambda sharded: (shardproof.adam if sharded.rank == 1 else shardproof.adamw)(sharded, lr=0.1)
        ),
        ["step 2", "decoupled_weight_decay=true", "step 2", "AdamRule"],
    ),
    "clipping": (clipped, ["clip_gradients to 1", "clip_gradients to 2"]),
    "a step more": (
        lambda comm: trained(comm, change=lambda sharded, optimizer, step: sharded.skip_step()),
        ["step 1", "step 2"],
    ),
}


# Of ranks whose backend sees data alone. They are not in one place: who is told ends, and the others then fail.
APART = {
    "a batch left out": run_apart(3, True),
    "evaluation alone": run_apart(2, False),
}


def run(name, comm):
    """The error of this rank, checked; for ranks that are processes."""
    body, _ = CASES[name]
    try:
        body(comm)
    except RuntimeError as error:  # a backward hands on no other
        check(name, str(error))
        return "refused"
    raise AssertionError(f"{name}: rank {comm.rank} was told nothing")


def check(name, text):
    at = 0
    for word in CASES[name][1]:
        found = text.find(word, at)
        assert found >= 0, f"{name}: '{word}' is missing, or comes too early, in: {text}"
        at = found + len(word)


if __name__ == "__main__":  # under mpirun
    torch.set_num_threads(1)
    try:
        shardproof.run_mpi(CASES[sys.argv[1]][0])
    except RuntimeError as refused:
        check(sys.argv[1], str(refused))
        print("refused", flush=True)
