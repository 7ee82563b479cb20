"""torchtitan's Trainer on its debug model of Llama 3, as the ranks of test_torchtitan.py run it.

Its arguments: "theirs" or "ours", the dtype of computation, how many ranks share each layer, a folder for its checkpoints, and
one to resume from, or "".
"""

import json
import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from program_kit import begin, leave

WHOSE, DTYPE, SHARED, FOLDER, LOADED = sys.argv[1:]
store = begin(WHOSE)
import torchtitan_on_cpu  # noqa: E402, F401
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.metrics import BaseLogger  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.models.llama3.parallelize import parallelize_llama  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402


class Tokens(BaseDataLoader):
    """Batches of tokens that are drawn, in the place of a text."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, *, dp_rank, dp_world_size, seq_len, local_batch_size, **others):
        self.shape, self.rank, self.ranks = (local_batch_size, seq_len + 1), dp_rank, dp_world_size
        self.number = 0

    def __iter__(self):
        while True:
            generator = torch.Generator().manual_seed(self.number * self.ranks + self.rank)
            self.number += 1
            tokens = torch.randint(0, 64, self.shape, generator=generator)
            positions = torch.arange(self.shape[1] - 1).expand(self.shape[0], -1)
            yield {"input": tokens[:, :-1].contiguous(), "positions": positions}, tokens[:, 1:].contiguous()

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **others):
        super().__init__()

    def encode(self, *args, **kwargs):
        raise NotImplementedError

    decode = get_vocab_size = encode


class Said(BaseLogger):
    def __init__(self):
        self.lines = []

    def log(self, metrics, step):
        names = ("loss_metrics/global_avg_loss", "loss_metrics/global_max_loss", "grad_norm", "lr")
        line = [step, *(value for name, value in metrics.items() if name.startswith(names))]
        assert len(line) >= 1 + len(names), sorted(metrics)
        self.lines.append(line)


def parallelized(model, **how):
    """The model as torchtitan's own function leaves it, whose gradients are sums: Gloo cannot multiply terms before it adds."""
    parallelize_llama(model, **how)
    for module in model.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)
    return model


config = llama3_debugmodel()
config.model_spec.parallelize_fn = parallelized
config.dump_folder = FOLDER
config.tokenizer, config.dataloader = NoTokenizer.Config(), Tokens.Config()
del config.model_spec.model.layers[2:]  # of six, which take longer and say no more
for layer in config.model_spec.model.layers:  # the attention that it has has no backward on a CPU
    layer.attention.inner_attention = ScaledDotProductAttention.Config()
config.training.mixed_precision_param = DTYPE
config.parallelism.tensor_parallel_degree = int(SHARED)
config.training.local_batch_size = 2
config.training.global_batch_size = 2 * 2 * dist.get_world_size() // int(SHARED)  # by two microbatches
config.training.seq_len, config.training.steps = 16, 4
config.training.disable_cuda_graphs = True
config.debug.seed = 1337
config.validator.enable = False
config.checkpoint.enable, config.checkpoint.interval = True, 2
config.checkpoint.load_only = bool(LOADED)
if LOADED:
    config.checkpoint.initial_load_path = os.path.join(LOADED, "checkpoint", "step-2")
    config.checkpoint.initial_load_model_only = False
trainer = Trainer(config)
said = trainer.metrics_processor.logger = Said()
trainer.train()
if dist.get_rank() == 0:
    print(json.dumps(said.lines))
leave(store)
