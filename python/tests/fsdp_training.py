"""Programs as users of FSDP2 write them, about optimizers, gradients and losses. Each runs with either library."""

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_kit import given, gradients, net, sharded, train, values, whole
from models import Net, loss_of


def an_optimizer_of_shards(lib):
    model = sharded(lib)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    return train(model, torch.optim.AdamW(model.parameters(), lr=0.01)), values(model)


def mixed_precision(lib):
    policy = lib.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(lib, mp_policy=policy)
    return train(model, torch.optim.AdamW(model.parameters(), lr=0.01), loss=lambda m, b: loss_of(m, b).float()), values(model)


def mixed_precision_without_a_dtype_of_sums(lib):
    model = sharded(lib, mp_policy=lib.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    loss_of(model, given(0)).float().backward()
    return gradients(model)


def parameters_stay_whole_after_the_forward(lib):
    model = sharded(lib, reshard_after_forward=False)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)), values(model)


def two_optimizers(lib):
    model = sharded(lib)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    first, second = torch.optim.AdamW(matrices, lr=0.01), torch.optim.SGD(others, lr=0.1)
    for step in range(3):
        loss_of(model, given(step)).backward()
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()
    return values(model)


def one_optimizer_of_two_models(lib):
    models = [sharded(lib), sharded(lib, net(width=8, blocks=1))]
    optimizer = torch.optim.AdamW([p for model in models for p in model.parameters()], lr=0.01)
    for step in range(2):
        optimizer.zero_grad()
        sum(loss_of(model, given(step)) for model in models).backward()
        optimizer.step()
    return [values(model) for model in models]


def a_group_that_is_added_later(lib):
    model = sharded(lib)
    optimizer = torch.optim.SGD(model.blocks.parameters(), lr=0.1)
    train(model, optimizer, 1)
    optimizer.add_param_group({"params": [*model.inp.parameters(), *model.out.parameters()], "lr": 0.01})
    return train(model, optimizer, 2), values(model)


def accumulation_without_a_flag(lib):
    model = sharded(lib)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        for k in range(3):
            (loss_of(model, given(3 * step + k)) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def accumulation_on_each_rank(lib):
    model = sharded(lib)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        for k in range(3):
            model.set_requires_gradient_sync(k == 2)
            model.set_is_last_backward(k == 2)
            (loss_of(model, given(3 * step + k)) / 3).backward()
            assert k == 2 or all(p.grad is None for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def two_losses_of_one_forward(lib):
    model = sharded(lib)
    x, y = given(0)
    result = model(x)
    (result - y).square().mean().backward(retain_graph=True)
    first = gradients(model)
    result.abs().mean().backward()
    return first, gradients(model)


def forwards_before_their_backwards(lib):
    model = sharded(lib)
    losses = [loss_of(model, given(k)) for k in range(3)]
    for loss in (losses[1], losses[0], losses[2]):
        loss.backward()
    return gradients(model)


def a_loss_that_calls_the_head_by_parts(lib):
    """As torchtitan's: backwards of the head come between the forward of the model and its backward."""

    class Headless(Net):
        def forward(self, x):
            x = self.inp(x)
            for block in self.blocks:
                x = block(x)
            return self.norm(x)

    model = Headless()
    model.load_state_dict(net().state_dict())
    model.norm = nn.LayerNorm(12)
    lib.fully_shard([model.norm, model.out])
    sharded(lib, model)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []

    def keep_head(kept):
        model.out.set_reshard_after_forward(not kept)
        model.out.set_reshard_after_backward(not kept)
        model.out.set_requires_gradient_sync(not kept, recurse=False)

    for step in range(3):
        x, y = given(step)
        hidden = model(x)
        parts = [part.detach().requires_grad_() for part in hidden.split(2)]
        keep_head(True)
        model.out.unshard()
        for part, label in zip(parts, y.split(2)):
            if part is parts[-1]:
                model.out.set_requires_gradient_sync(True, recurse=False)
            losses.append((model.out(part) - label).square().sum() / len(y))
            losses[-1].backward()
        keep_head(False)
        model.out.reshard()
        hidden.backward(torch.cat([part.grad for part in parts]))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses).detach(), values(model)


def gradients_of_inputs(lib):
    model = sharded(lib)
    x = given(0)[0].requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x)
    assert all(p.grad is None for p in model.parameters())
    loss_of(model, given(1)).backward()
    return gradient, gradients(model)


def gradients_of_inputs_before_those_of_weights(lib):
    model = sharded(lib)
    inputs, losses = [given(k)[0].requires_grad_() for k in range(3)], []
    for k, x in enumerate(inputs):
        losses.append(loss_of(model, (x, given(k)[1])))
        (x.grad,) = torch.autograd.grad(losses[-1], x, retain_graph=True)
        assert all(p.grad is None for p in model.parameters())
    of_inputs = [x.grad.clone() for x in inputs]
    for k in (1, 0, 2):
        losses[k].backward()
    return of_inputs, gradients(model)


def derivatives_along_a_direction(lib):
    """As of losses with a derivative by time; pytorch#182641."""
    model, (x, y) = sharded(lib), given(0)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    with torch.no_grad():
        first = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    for step in range(2):
        optimizer.zero_grad()
        value, derivative = torch.func.jvp(model, (given(step)[0],), (y.expand_as(x),))
        losses.append((value - y).square().mean() + derivative.square().mean())
        losses[-1].backward()
        optimizer.step()
    return first, torch.stack(losses).detach(), values(model)


def a_pipeline_without_bubbles(lib):
    """Two stages on each rank. FSDP2 makes gradients of weights later, of parameters that stay whole; here all come first."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

    mesh = init_device_mesh("cpu", (1, torch.distributed.get_world_size()), mesh_dim_names=("stages", "dp"))
    of_theirs, of_ours = dict(reshard_after_forward=False), dict(dw_builder=lambda: lambda: None)
    is_ours, model = lib.__name__ == "shardproof.fsdp", net()
    parts = [torch.nn.Sequential(model.inp, model.blocks[0]), torch.nn.Sequential(*model.blocks[1:], model.out)]
    stages = []
    for part in parts:
        for module in (*part, part):
            lib.fully_shard(module, mesh=mesh["dp"], **({} if is_ours else of_theirs))
        where = dict(device=torch.device("cpu"), group=mesh["stages"].get_group())
        stages.append(PipelineStage(part, len(stages), 2, **where, **(of_ours if is_ours else {})))
    schedule = ScheduleInterleavedZeroBubble(stages, n_microbatches=3, loss_fn=torch.nn.functional.mse_loss)
    optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.1)
    losses: list = []
    for step in range(2):
        x, y = given(step)
        schedule.step(x, target=y, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses).detach(), [values(part) for part in parts]


def a_scaler(lib):
    model = sharded(lib)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, given(step)) * (math.inf if step == 1 else 1)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale(), values(model)


def clipping(lib):
    model, norms = sharded(lib), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, kind in enumerate((1.0, 2.0, 3.0)):
        optimizer.zero_grad()
        loss_of(model, given(step)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, kind).full_tensor())
        optimizer.step()
    optimizer.zero_grad()
    loss_of(model, given(3)).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm)
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.001)
    optimizer.step()
    return norms, values(model)


def hooks_after_accumulation(lib):
    model, seen = sharded(lib), []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.append((name, whole(p.grad).sum().item())))
    loss_of(model, given(0)).backward()
    return sorted(seen)


def an_optimizer_within_the_backward(lib):
    model = sharded(lib)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)
    for k in range(3):
        loss_of(model, given(k)).backward()
    return values(model)


def an_optimizer_from_before(lib):
    model = net()
    if lib.__name__ != "shardproof.fsdp":  # where FSDP2 leaves it behind, Accelerate and others put the shards into it
        model = sharded(lib, model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model = sharded(lib, model)
    return train(model, optimizer), values(model)


def a_step_that_is_left_out(lib):
    model = sharded(lib)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, given(0)).backward()
    optimizer.zero_grad()
    return train(model, optimizer, 2), values(model)


def a_schedule_of_rates(lib):
    model = sharded(lib)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule, losses = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4), []
    for step in range(3):
        losses += train(model, optimizer, 1)
        schedule.step()
    return losses, values(model)


def fused_and_foreach(lib):
    results = []
    for how in (dict(foreach=True), dict(foreach=False), dict(fused=True)):
        model = sharded(lib)
        results.append((train(model, torch.optim.AdamW(model.parameters(), lr=0.01, **how)), values(model)))
    return results


def a_gradient_that_is_replaced(lib):
    model = sharded(lib)
    loss_of(model, given(0)).backward()
    for parameter in model.parameters():
        parameter.grad = parameter.grad * 2
    loss_of(model, given(1)).backward()
    return gradients(model)


def a_closure_that_runs_several_times(lib):
    model = sharded(lib)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure():
        optimizer.zero_grad()
        value = loss_of(model, given(0))
        value.backward()
        return value

    try:
        return [float(optimizer.step(closure)) for _ in range(2)]
    except RuntimeError as error:  # DTensors of newer torch cannot be flattened, which this optimizer does
        if "would remove or reshape sharded dimension" not in str(error):
            raise
        return str(error)


def muon_beside_adamw(lib):
    """Newton's iteration needs whole matrices, which DTensors gather by themselves."""
    model = sharded(lib)
    matrices = [p for name, p in model.named_parameters() if name.startswith("blocks") and p.dim() == 2]
    rest = [p for name, p in model.named_parameters() if not name.startswith("blocks") or p.dim() < 2]
    optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]
    for step in range(2):
        loss_of(model, given(step)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return values(model)
