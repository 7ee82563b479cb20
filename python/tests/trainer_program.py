"""A program for the Trainer of transformers with FSDP2, as the ranks of test_accelerate.py run it.

Its arguments: "theirs" or "ours", a folder for its checkpoints, and one to resume from, or "".
"""

import json
import os
import sys

import torch
import torch.distributed as dist

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, os.pardir, "ci", "tests"))
from peer_ranks import join, leave  # noqa: E402

WHOSE, FOLDER, LOADED = sys.argv[1:]
if WHOSE == "ours":
    import shardproof.fsdp

    shardproof.fsdp.patch_torch()

from accelerate import PartialState  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments  # noqa: E402

store = join()
os.environ["MASTER_ADDR"] = "127.0.0.1"  # Accelerate asks for it, though the process group is there
settings = TrainingArguments(
    FOLDER,
    use_cpu=True,
    per_device_train_batch_size=3,
    gradient_accumulation_steps=2,
    max_steps=6,
    save_steps=3,
    logging_steps=1,
    learning_rate=1e-2,
    report_to=[],
    disable_tqdm=True,
    fsdp=True,
    fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
)
assert settings.device.type == "cpu"
# On a CPU Accelerate leaves its plugin out, by the name of the kind of ranks alone.
PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64,
)  # fmt: skip
tokens = [torch.randint(0, 64, (12,), generator=torch.Generator().manual_seed(i)) for i in range(48)]
trainer = Trainer(LlamaForCausalLM(config), settings, train_dataset=[{"input_ids": each, "labels": each} for each in tokens])
trainer.train(resume_from_checkpoint=LOADED or None)
assert type(trainer.model_wrapped).__name__ == "FSDPLlamaForCausalLM"
if dist.get_rank() == 0:
    print(json.dumps([[entry["loss"], entry["grad_norm"]] for entry in trainer.state.log_history if "loss" in entry]))
leave(store)
