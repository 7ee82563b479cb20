"""A program written for Accelerate's plugin of FSDP2, as the ranks of test_accelerate.py run it.

Its arguments: "theirs" or "ours", the precision, what the plugin has besides, the folder to save to, and one to load from.
"""

import json
import os
import sys

import torch
import torch.distributed as dist

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, os.pardir, "ci", "tests"))
from peer_ranks import join, leave  # noqa: E402

WHOSE, PRECISION, EXTRAS, SAVED, LOADED = sys.argv[1:]
if WHOSE == "ours":
    import shardproof.fsdp

    shardproof.fsdp.patch_torch()

from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

store = join()
os.environ["MASTER_ADDR"] = "127.0.0.1"  # Accelerate asks for it, though the process group is there
# On a CPU Accelerate leaves its plugin out, by the name of the kind of ranks alone.
PartialState(cpu=True)
PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
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
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64, tie_word_embeddings="tied" in EXTRAS,
)  # fmt: skip
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=8)
tokens = [torch.randint(0, 64, (12,), generator=torch.Generator().manual_seed(i)) for i in range(24)]
loader = torch.utils.data.DataLoader([{"input_ids": each, "labels": each} for each in tokens], batch_size=3)
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
