"""A program for Lightning's ModelParallelStrategy, as the ranks of test_lightning.py run it.

Its arguments: "theirs" or "ours", the precision, a folder for its checkpoint, and one to resume from, or "".
"""

import json
import os
import sys
import warnings

import torch
import torch.distributed as dist
from program_kit import begin, leave, model_of, samples

WHOSE, PRECISION, FOLDER, LOADED = sys.argv[1:]
store = begin(WHOSE)
os.environ.update(MASTER_PORT="1", GROUP_RANK="0", LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"])  # what torchrun sets
import lightning  # noqa: E402
from lightning.pytorch.plugins.environments import TorchElasticEnvironment  # noqa: E402
from lightning.pytorch.strategies import ModelParallelStrategy  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402

warnings.filterwarnings("ignore")


class Task(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model_of()
        self.said = []

    def configure_model(self):
        if hasattr(self.model, "unshard"):
            return
        policy = MixedPrecisionPolicy(**({"param_dtype": torch.bfloat16} if PRECISION == "bf16" else {}))
        mesh = self.device_mesh["data_parallel"]
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)

    def training_step(self, batch):
        loss = self.model(**batch).loss
        self.said.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_before_optimizer_step(self, optimizer):
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5)
        self.said.append(norm.full_tensor().item())


def trained(epochs, path):
    strategy = ModelParallelStrategy(save_distributed_checkpoint=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        plugins=[TorchElasticEnvironment()],
        max_epochs=epochs,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    task = Task()
    trainer.fit(task, torch.utils.data.DataLoader(samples(24), batch_size=3), ckpt_path=path)
    return trainer, task


trainer, task = trained(1, None)
trainer.save_checkpoint(os.path.join(FOLDER, "at"))
said = task.said + trained(2, os.path.join(LOADED or FOLDER, "at"))[1].said
if dist.get_rank() == 0:
    print(json.dumps(said))
leave(store)
