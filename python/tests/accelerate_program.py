"""A program written for Accelerate's plugin of FSDP2, as the ranks of test_accelerate.py run it.

Its arguments: "theirs" or "ours", the precision, what the plugin has besides, the folder to save to, and one to load from.
"""

import json
import sys

import torch
import torch.distributed as dist
from program_kit import begin, leave, let_a_cpu_have_fsdp, model_of, samples

WHOSE, PRECISION, EXTRAS, SAVED, LOADED = sys.argv[1:]
store = begin(WHOSE)
from accelerate import Accelerator, FullyShardedDataParallelPlugin  # noqa: E402

let_a_cpu_have_fsdp()
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2,
    auto_wrap_policy="transformer_based_wrap",
    transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    reshard_after_forward=True,
    cpu_ram_efficient_loading="ram" in EXTRAS,
    activation_checkpointing="again" in EXTRAS,
    state_dict_type="FULL_STATE_DICT" if "whole" in EXTRAS else "SHARDED_STATE_DICT",
)
accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2, mixed_precision=PRECISION)
model = model_of(tied="tied" in EXTRAS)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=8)
loader = torch.utils.data.DataLoader(samples(24), batch_size=3)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)


def epoch():
    seen = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                seen.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            seen.append(accelerator.reduce(loss.detach(), "mean").item())
    return seen


seen = {"first": epoch()}
accelerator.save_state(SAVED)
seen["second"] = epoch()
accelerator.load_state(LOADED)
seen["again"] = epoch()
whole = accelerator.get_state_dict(model)
seen["whole"] = {name: value.double().square().sum().item() for name, value in whole.items()}
if dist.get_rank() == 0:
    print(json.dumps(seen))
leave(store)
