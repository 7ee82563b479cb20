"""The second reference: the models once more for PyTorch, with own losses, optimizers and clipping, in float64.

Embedded into the library at build time. Nothing here is shared with the C++ reference but names and shapes of
parameters. A tensor arrives as (buffer, dtype name, shape) and leaves as (bytes of float64, shape). Nothing
global is touched: no seed, no default dtype, no number of threads.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

# Parameters are made without storage: initialising them would draw from the random generator that C++ shares.
MADE = {"dtype": torch.float64, "device": "meta"}


class Perceptron(nn.Module):
    ACTIVATIONS = {"identity": nn.Identity, "relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU}

    def __init__(self, widths, activation, bias):
        super().__init__()
        pairs = zip(widths[:-1], widths[1:])
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=bias, **MADE) for a, b in pairs)
        self.between = self.ACTIVATIONS[activation]()

    def forward(self, x):
        *first, last = self.layers
        for layer in first:
            x = self.between(layer(x))
        return last(x)

    def loss(self, x, target):
        return F.mse_loss(self(x), target, reduction="sum")


class Attention(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(hidden, 3 * hidden, **MADE)
        self.c_proj = nn.Linear(hidden, hidden, **MADE)

    def forward(self, x):
        length, hidden = x.shape[1:]
        width = hidden // self.heads
        query, key, value = self.c_attn(x).chunk(3, dim=-1)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        heads = []
        for h in range(self.heads):
            mine = slice(h * width, (h + 1) * width)
            scores = query[..., mine] @ key[..., mine].mT / math.sqrt(width)
            heads.append(scores.masked_fill(future, -math.inf).softmax(-1) @ value[..., mine])
        return self.c_proj(torch.cat(heads, -1))


class Block(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.ln_1 = nn.LayerNorm(hidden, **MADE)
        self.attn = Attention(hidden, heads)
        self.ln_2 = nn.LayerNorm(hidden, **MADE)
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(hidden, 4 * hidden, **MADE), "c_proj": nn.Linear(4 * hidden, hidden, **MADE)}
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x))))


class Gpt(nn.Module):
    def __init__(self, layers, hidden, heads, vocab, positions, tied):
        super().__init__()
        self.wte = nn.Embedding(vocab, hidden, **MADE)
        self.wpe = nn.Embedding(positions, hidden, **MADE)
        self.h = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(hidden, **MADE)
        self.lm_head = None if tied else nn.Linear(hidden, vocab, bias=False, **MADE)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        return x @ self.wte.weight.mT if self.lm_head is None else self.lm_head(x)

    def loss(self, tokens, targets):
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten(), reduction="sum")


def tensor(given):
    buffer, dtype, shape = given
    values = torch.frombuffer(buffer, dtype=getattr(torch, dtype)).reshape(shape)
    return values.to(torch.float64) if values.is_floating_point() else values.clone()


def exported(values):
    out = bytearray(8 * values.numel())
    torch.frombuffer(out, dtype=torch.float64).copy_(values.detach().flatten())
    return bytes(out), list(values.shape)


def make_model(kind, options, given):
    """The model with the given values in it; `given` must be exactly its own parameters, in their order."""
    model = {"mlp": Perceptron, "gpt": Gpt}[kind](**options).to_empty(device="cpu")
    values = [(name, tensor(value)) for name, value in given]
    own = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    if own != [(name, tuple(value.shape)) for name, value in values]:
        raise ValueError(f"the model has the parameters {own}, which are not those of the run")
    with torch.no_grad():
        for parameter, (_, value) in zip(model.parameters(), values):
            parameter.copy_(value)
    return model


def make_optimizer(parameters, kind, lr, momentum, weight_decay, beta1, beta2, eps):
    common = {"lr": lr, "weight_decay": weight_decay, "foreach": False}
    if kind == "sgd":
        return torch.optim.SGD(parameters, momentum=momentum, **common)
    return torch.optim.AdamW(parameters, betas=(beta1, beta2), eps=eps, **common)


def train_step(model, optimizer, microbatches, divide, clip_norm):
    optimizer.zero_grad(set_to_none=False)
    losses = []
    for ranks in microbatches:
        losses.append([])
        for given, target, weight in ranks:
            loss = weight * model.loss(tensor(given), tensor(target))
            loss.backward()
            losses[-1].append(loss.item())
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad /= divide
    norm_max = clip_norm if clip_norm > 0 else math.inf
    norm = nn.utils.clip_grad_norm_(model.parameters(), norm_max, foreach=False)
    gradients = [(name, exported(p.grad)) for name, p in model.named_parameters()]
    optimizer.step()

    named = list(model.named_parameters())
    slots = [s for s in ("momentum_buffer", "exp_avg", "exp_avg_sq") if s in optimizer.state[named[0][1]]]
    return {
        "losses": losses,
        "gradient_norm": norm.item(),
        "gradients": gradients,
        "parameters": [(name, exported(p)) for name, p in named],
        "state": [(s, [(name, exported(optimizer.state[p][s])) for name, p in named]) for s in slots],
    }


def train(kind, model_options, parameters, optimizer_options, steps):
    model = make_model(kind, model_options, parameters)
    optimizer = make_optimizer(model.parameters(), **optimizer_options)
    return [train_step(model, optimizer, *step) for step in steps]
