"""A script in the manner of nanoGPT on FSDP2, as the ranks of test_nanogpt.py run it: one file, a loop, and a ckpt.pt.

Its arguments: "theirs" or "ours", "fp32" or "bf16", a folder for its checkpoint, and one to resume from, or "".
"""

import json
import math
import os
import sys

import torch
import torch.distributed as dist
from program_kit import join, leave
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.nn import functional as F

WHOSE, PRECISION, FOLDER, LOADED = sys.argv[1:]
store = join()
if WHOSE == "ours":
    from shardproof.fsdp import MixedPrecisionPolicy, fully_shard
else:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

layers, heads, width, block_size, vocab = 3, 4, 32, 16, 65
batch_size, accumulation, steps, warmup, decays_until = 4, 3, 6, 2, 6
learning_rate, rate_min, weight_decay, norm_max = 1e-2, 1e-3, 0.1, 1.0
data = torch.randint(0, vocab, (4000,), generator=torch.Generator().manual_seed(1337))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width, bias=False)
        self.c_proj = nn.Linear(width, width, bias=False)

    def forward(self, x):
        q, k, v = (each.unflatten(2, (heads, -1)).transpose(1, 2) for each in self.c_attn(x).split(width, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(block_size, width)
        self.h = nn.ModuleList(Block() for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.wte.weight = self.lm_head.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                scale = math.sqrt(2 * layers) if name.endswith("c_proj.weight") else 1
                nn.init.normal_(parameter, std=0.02 / scale)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.size(1)))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def configure_optimizers(self):
        decays = [p for p in self.parameters() if p.dim() >= 2]
        others = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decays, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))


def batch_of(number):
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    starts = torch.randint(len(data) - block_size - 1, (batch_size,), generator=generator)
    windows = torch.stack([data[i : i + block_size + 1] for i in starts])
    return windows[:, :-1], windows[:, 1:]


def rate_at(step):
    if step < warmup:
        return learning_rate * (step + 1) / (warmup + 1)
    done = (step - warmup) / (decays_until - warmup)
    return rate_min + 0.5 * (1 + math.cos(math.pi * done)) * (learning_rate - rate_min)


def summed(loss):
    dist.all_reduce(loss)
    return loss.item()


@torch.no_grad()
def estimate_loss(model):
    model.eval()
    losses = [model(*batch_of(1000 + i)) for i in range(2)]
    model.train()
    return summed(torch.stack(losses).mean())


torch.manual_seed(1337)
model = GPT()
half = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
policy = MixedPrecisionPolicy(**half if PRECISION == "bf16" else {})
for block in model.h:
    fully_shard(block, mp_policy=policy)
fully_shard(model, mp_policy=policy)
optimizer = model.configure_optimizers()
first = 0
whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
if LOADED:
    checkpoint = torch.load(os.path.join(LOADED, "ckpt.pt"))
    first = checkpoint["step"]
    set_state_dict(
        model, optimizer, model_state_dict=checkpoint["model"], optim_state_dict=checkpoint["optimizer"], options=whole
    )

said = []
for step in range(first, steps):
    for group in optimizer.param_groups:
        group["lr"] = rate_at(step)
    if step == steps // 2:
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=whole)))
        if dist.get_rank() == 0:
            torch.save({**states, "step": step}, os.path.join(FOLDER, "ckpt.pt"))
        said.append(estimate_loss(model))
    total = 0.0
    for microbatch in range(accumulation):
        model.set_requires_gradient_sync(microbatch == accumulation - 1)
        loss = model(*batch_of(step * accumulation + microbatch)) / accumulation
        total += loss.detach()
        loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), norm_max)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    said.append([summed(total), norm.full_tensor().item()])
if dist.get_rank() == 0:
    print(json.dumps(said))
leave(store)
