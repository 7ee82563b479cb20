"""A program for the Trainer of transformers with FSDP2, as the ranks of test_accelerate.py run it.

Its arguments: "theirs" or "ours", a folder for its checkpoints, and one to resume from, or "".
"""

import json
import sys

import torch.distributed as dist
from program_kit import begin, leave, let_a_cpu_have_fsdp, model_of, samples

WHOSE, FOLDER, LOADED = sys.argv[1:]
store = begin(WHOSE)
from transformers import Trainer, TrainingArguments  # noqa: E402

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
let_a_cpu_have_fsdp()
trainer = Trainer(model_of(), settings, train_dataset=samples(48))
trainer.train(resume_from_checkpoint=LOADED or None)
assert type(trainer.model_wrapped).__name__ == "FSDPLlamaForCausalLM"
if dist.get_rank() == 0:
    print(json.dumps([[entry["loss"], entry["grad_norm"]] for entry in trainer.state.log_history if "loss" in entry]))
leave(store)
