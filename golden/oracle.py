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


class Convolutions(nn.Module):
    def __init__(self, channels, kernel, classes, norm, batch):
        super().__init__()
        self.layers = len(channels) - 1
        pairs = list(zip(channels[:-1], channels[1:]))
        self.conv = nn.ModuleList(nn.Conv2d(a, b, kernel, padding="same", **MADE) for a, b in pairs)
        make_norm = (lambda width: nn.BatchNorm2d(width, **MADE)) if batch else (lambda width: nn.GroupNorm(1, width, **MADE))
        self.norm = nn.ModuleList(make_norm(b) for _, b in pairs) if norm else None
        self.head = nn.Linear(channels[-1], classes, **MADE)

    def in_order(self):
        """Layer by layer: what the run calls its order."""
        named = dict(self.named_parameters())
        prefixes = [f"{kind}.{i}." for i in range(self.layers) for kind in ("conv", "norm")] + ["head."]
        return [(n, p) for prefix in prefixes for n, p in named.items() if n.startswith(prefix)]

    def forward(self, x):
        for i, conv in enumerate(self.conv):
            x = conv(x)
            x = F.relu(self.norm[i](x) if self.norm is not None else x)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Oddities(nn.Module):
    def __init__(self, width, calls, gain, cube, empty, side, never, tied):
        super().__init__()

        def parameter(present, *shape):
            return nn.Parameter(torch.empty(shape, **MADE)) if present else None

        self.calls = calls
        self.shared = nn.Linear(width, width, **MADE)
        self.gain = parameter(gain)
        self.cube = parameter(cube, 2, width, 1)
        self.empty = parameter(empty, 0, width)
        self.side = nn.Linear(width, width, bias=False, **MADE) if side else None
        self.never = parameter(never, width)
        self.tied = tied

    def in_order(self):
        own = ("shared.weight", "shared.bias", "gain", "cube", "empty", "side.weight", "never")
        named = dict(self.named_parameters())
        return [(n, named[n]) for n in own if n in named]

    def forward(self, x, branch):
        x = x * torch.tensor([1 + i / 8 for i in range(x.shape[1])], dtype=x.dtype)
        for _ in range(self.calls):
            x = torch.tanh(self.shared(x))
        if self.gain is not None:
            x = self.gain * x
        if self.cube is not None:
            x = x + torch.einsum("bw,cwo->bw", x, self.cube)
        if self.empty is not None:
            x = x + torch.einsum("ew->w", self.empty)
        if self.side is not None and branch:
            x = x + self.side(x)
        if self.tied:
            x = torch.tanh(x) @ self.shared.weight.mT
        return x


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
    def __init__(self, hidden, heads, gelu):
        super().__init__()
        self.gelu = gelu
        self.ln_1 = nn.LayerNorm(hidden, **MADE)
        self.attn = Attention(hidden, heads)
        self.ln_2 = nn.LayerNorm(hidden, **MADE)
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(hidden, 4 * hidden, **MADE), "c_proj": nn.Linear(4 * hidden, hidden, **MADE)}
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate=self.gelu))


class Gpt(nn.Module):
    def __init__(self, layers, hidden, heads, vocab, positions, tied, gelu):
        super().__init__()
        self.wte = nn.Embedding(vocab, hidden, **MADE)
        self.wpe = nn.Embedding(positions, hidden, **MADE)
        self.h = nn.ModuleList(Block(hidden, heads, gelu) for _ in range(layers))
        self.ln_f = nn.LayerNorm(hidden, **MADE)
        self.lm_head = None if tied else nn.Linear(hidden, vocab, bias=False, **MADE)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        return x @ self.wte.weight.mT if self.lm_head is None else self.lm_head(x)


class RmsNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, **MADE))

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight, eps=self.eps)


class LlamaAttention(nn.Module):
    def __init__(self, hidden, heads, kv_heads, qk_norm, qkv_bias, head, eps, theta, slower, window):
        super().__init__()
        self.window = window
        self.heads, self.kv_heads, self.width = heads, kv_heads, head
        self.theta, self.slower = theta, slower
        self.q_proj = nn.Linear(hidden, heads * head, bias=qkv_bias, **MADE)
        self.k_proj = nn.Linear(hidden, kv_heads * head, bias=qkv_bias, **MADE)
        self.v_proj = nn.Linear(hidden, kv_heads * head, bias=qkv_bias, **MADE)
        self.o_proj = nn.Linear(heads * head, hidden, bias=False, **MADE)
        self.q_norm = RmsNorm(self.width, eps) if qk_norm else nn.Identity()
        self.k_norm = RmsNorm(self.width, eps) if qk_norm else nn.Identity()

    def turn(self, head):
        """Pairs (i, i + half) as complex numbers, times e^(i * angle)."""
        half = self.width // 2
        # The rates are part of the model as float32 numbers.
        rates = 1 / self.theta ** (torch.arange(0, self.width, 2).to(torch.float32) / self.width)
        if self.slower is not None:
            factor, low, high, positions = self.slower
            # A number over a tensor would be multiplied by the reciprocal, which rounds once more.
            turn = torch.full_like(rates, 2 * math.pi) / rates  # so many tokens
            wide = torch.full_like(rates, high) - low
            part = (torch.full_like(turn, positions) / turn - low) / wide
            between = torch.where(turn < positions / high, rates, (1 - part) * rates / factor + part * rates)
            rates = torch.where(turn > positions / low, rates / factor, between)
        angles = torch.arange(head.shape[1]).to(torch.float32)[:, None] * rates[None, :]
        turn = torch.polar(torch.ones_like(angles.double()), angles.double())
        turned = torch.complex(head[..., :half].double(), head[..., half:].double()) * turn
        return torch.cat((turned.real, turned.imag), -1).to(head.dtype)

    def forward(self, x, documents):
        """`documents` [B, T]: the number of each token's document."""
        query, key, value = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        if self.window > 0:
            seen = seen ^ seen.tril(-self.window)
        seen = seen & (documents[:, :, None] == documents[:, None, :])
        heads = []
        for h in range(self.heads):
            mine = slice(h * self.width, (h + 1) * self.width)
            kv = h * self.kv_heads // self.heads
            served = slice(kv * self.width, (kv + 1) * self.width)
            query_head, key_head = self.q_norm(query[..., mine]), self.k_norm(key[..., served])
            scores = self.turn(query_head) @ self.turn(key_head).mT / math.sqrt(self.width)
            heads.append(scores.masked_fill(~seen, -math.inf).softmax(-1) @ value[..., served])
        return self.o_proj(torch.cat(heads, -1))


class GatedMlp(nn.Module):
    def __init__(self, hidden, width):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False, **MADE)
        self.up_proj = nn.Linear(hidden, width, bias=False, **MADE)
        self.down_proj = nn.Linear(width, hidden, bias=False, **MADE)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """Each expert's output for each token, whether it is wanted or not: [.., hidden] -> [.., experts, hidden]."""

    def __init__(self, count, hidden, width):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * width, hidden, **MADE))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, width, **MADE))

    def forward(self, x):
        gate, up = torch.einsum("...h,ewh->...ew", x, self.gate_up_proj).chunk(2, dim=-1)
        return torch.einsum("...ew,ehw->...eh", F.silu(gate) * up, self.down_proj)


def highest(scores, count):
    """Which ones have less than `count` before them: those with a higher score, and equal ones of a lower index."""
    one, other = scores[..., :, None], scores[..., None, :]
    index = torch.arange(scores.shape[-1])
    before = (other > one) | ((other == one) & (index[None, :] < index[:, None]))
    return before.sum(-1) < count


class Mixture(nn.Module):
    def __init__(
        self, hidden, count, per_token, width, shared, score, normalized, scale, groups, groups_per_token, balance, z, bias,
        capacity,
    ):
        super().__init__()
        self.balance, self.z, self.rate, self.capacity = balance, z, bias, capacity
        # What keeps experts busy: their bias, how often each was chosen in this step, and the last forward's own losses.
        self.bias = self.counts = torch.zeros(count, dtype=torch.float64)
        self.losses = 0
        self.per_token, self.score, self.normalized, self.scale = per_token, score, normalized, scale
        self.groups, self.groups_per_token = groups, groups_per_token
        self.gate = nn.Linear(hidden, count, bias=False, **MADE)
        self.experts = Experts(count, hidden, width)
        self.shared_experts = GatedMlp(hidden, shared) if shared > 0 else None

    def chosen(self, scores):
        scores = scores + self.bias
        grouped = scores.unflatten(-1, (self.groups, -1))
        strength = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        takes_part = highest(strength, self.groups_per_token)[..., None].expand_as(grouped).flatten(-2)
        return highest(scores.masked_fill(~takes_part, -math.inf), self.per_token)

    def weights(self, logits):
        """Zero for those that are not chosen."""
        if self.score == "chosen_softmax":
            return logits.masked_fill(~self.chosen(logits), -math.inf).softmax(-1)
        scores = logits.sigmoid() if self.score == "sigmoid" else logits.softmax(-1)
        kept = scores * self.chosen(scores)
        nothing = 1e-20 if self.score == "sigmoid" else 0
        return kept / (kept.sum(-1, keepdim=True) + nothing) if self.normalized else kept

    def keep_busy(self, logits):
        """What the forward of these logits [B, T, experts] costs, and counts."""
        scores = logits.sigmoid() if self.score == "sigmoid" else logits.softmax(-1)
        chosen = self.chosen(logits if self.score == "chosen_softmax" else scores).to(torch.float64)
        share = chosen.mean(dim=1, keepdim=True) * chosen.shape[-1] / self.per_token
        self.losses = self.balance * (share * scores / (scores.sum(-1, keepdim=True) + 1e-20)).sum()
        self.losses = self.losses + self.z * (logits.logsumexp(-1) ** 2).sum()
        self.counts = self.counts + chosen.sum((0, 1))

    def move_bias(self):
        self.bias = self.bias + self.rate * torch.sign(self.counts.mean() - self.counts)

    def forward(self, x):
        logits = self.gate(x)
        if self.balance or self.z or self.rate:
            self.keep_busy(logits)
        weights = self.weights(logits)
        if self.capacity:  # each expert keeps the highest of a sequence
            room = math.ceil(self.capacity * (x.shape[1] * self.per_token / weights.shape[-1]))
            weights = weights * highest(weights.mT, room).mT
        y = torch.einsum("...e,...eh->...h", self.scale * weights, self.experts(x))
        return y if self.shared_experts is None else y + self.shared_experts(x)


class LlamaLayer(nn.Module):
    def __init__(self, hidden, heads, kv_heads, intermediate, experts, eps, **attention):
        super().__init__()
        self.self_attn = LlamaAttention(hidden, heads, kv_heads, eps=eps, **attention)
        self.mlp = Mixture(hidden, **experts) if experts else GatedMlp(hidden, intermediate)
        self.input_layernorm = RmsNorm(hidden, eps)
        self.post_attention_layernorm = RmsNorm(hidden, eps)

    def forward(self, x, documents):
        x = x + self.self_attn(self.input_layernorm(x), documents)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    def __init__(
        self, layers, hidden, heads, kv_heads, intermediate, vocab, tied, experts, dense_layers, eps, window, full_layers,
        document_end, **attention
    ):
        super().__init__()
        self.document_end = document_end

        def layer(i):
            own = experts if i >= dense_layers else None
            return LlamaLayer(
                hidden, heads, kv_heads, intermediate, own, eps, window=window if i >= full_layers else 0, **attention
            )

        made = [layer(i) for i in range(layers)]
        self.model = nn.ModuleDict(
            {"embed_tokens": nn.Embedding(vocab, hidden, **MADE), "layers": nn.ModuleList(made), "norm": RmsNorm(hidden, eps)}
        )
        self.lm_head = None if tied else nn.Linear(hidden, vocab, bias=False, **MADE)

    def forward(self, tokens):
        x = self.model["embed_tokens"](tokens)
        # How many ends lie before a token.
        documents = F.pad(tokens == self.document_end, (1, 0))[:, :-1].cumsum(1)
        for layer in self.model["layers"]:
            x = layer(x, documents)
        x = self.model["norm"](x)
        return x @ self.model["embed_tokens"].weight.mT if self.lm_head is None else self.lm_head(x)


class Adapted(nn.Linear):
    def __init__(self, plain, rank, scale):
        super().__init__(plain.in_features, plain.out_features, plain.bias is not None, **MADE)
        self.lora_A = nn.Linear(plain.in_features, rank, bias=False, **MADE)
        self.lora_B = nn.Linear(rank, plain.out_features, bias=False, **MADE)
        self.scale = scale

    def forward(self, x):
        return super().forward(x) + self.scale * self.lora_B(self.lora_A(x))


def adapt(model, layers, rank, scale):
    """Adapters of low rank beside these linear layers."""
    for name in layers:
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, Adapted(model.get_submodule(name), rank, scale))


def tensor(given):
    buffer, dtype, shape = given
    if len(buffer) == 0:  # which frombuffer refuses
        return torch.empty(shape, dtype=torch.float64)
    values = torch.frombuffer(buffer, dtype=getattr(torch, dtype)).reshape(shape)
    return values.to(torch.float64) if values.is_floating_point() else values.clone()


def exported(values):
    out = bytearray(8 * values.numel())
    if out:
        torch.frombuffer(out, dtype=torch.float64).copy_(values.detach().flatten())
    return bytes(out), list(values.shape)


def parameters_of(model):
    """(name, parameter) in the order of the run."""
    return model.in_order() if hasattr(model, "in_order") else list(model.named_parameters())


def make_model(kind, options, given):
    """The model with the given values in it; `given` must be exactly its own parameters, in their order."""
    kinds = {"mlp": Perceptron, "gpt": Gpt, "conv": Convolutions, "odd": Oddities, "llama": Llama}
    options = dict(options)
    adapters = options.pop("adapters", None)
    model = kinds[kind](**options)
    if adapters:
        adapt(model, *adapters)
    model = model.to_empty(device="cpu")
    values = [(name, tensor(value)) for name, value in given]
    own = parameters_of(model)
    shapes = [(name, tuple(p.shape)) for name, p in own]
    if shapes != [(name, tuple(value.shape)) for name, value in values]:
        raise ValueError(f"the model has the parameters {shapes}, which are not those of the run")
    with torch.no_grad():
        for (_, parameter), (_, value) in zip(own, values):
            parameter.copy_(value)
    return model


def factors_of(name, groups):
    """The learning rate's and the decay's."""
    return next(((lr, decay) for pattern, lr, decay in groups if pattern in name), (1, 1))


def plainly(options, optimizer, **settings):
    return optimizer(options, **settings)


def make_optimizer(named, kind, lr, momentum, nesterov, weight_decay, beta1, beta2, eps, groups, make=plainly):
    """One group a pair of factors; "base_lr" is the rate that a step's own factor multiplies."""
    by_factors = {}
    for name, parameter in named:
        by_factors.setdefault(factors_of(name, groups), []).append(parameter)
    options = [
        {"params": own, "lr": lr * f, "base_lr": lr * f, "weight_decay": weight_decay * decay}
        for (f, decay), own in by_factors.items()
    ]
    if kind == "sgd":
        return make(options, torch.optim.SGD, lr=lr, momentum=momentum, nesterov=nesterov, foreach=False)
    made = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[kind]
    return make(options, made, lr=lr, betas=(beta1, beta2), eps=eps, foreach=False)


def inputs_of(model, given, branch):
    """What the model is called with."""
    return (tensor(given), branch) if isinstance(model, Oddities) else (tensor(given),)


def loss_of(output, target):
    if target.is_floating_point():
        return F.mse_loss(output, target, reduction="sum")
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


def mixtures(model):
    return [module for module in model.modules() if isinstance(module, Mixture)]


def backward(model, microbatches):
    losses = []
    for ranks in microbatches:
        losses.append([])
        for given, target, weight, branch in ranks:
            loss = loss_of(model(*inputs_of(model, given, branch)), tensor(target))
            loss = weight * (loss + sum(mixture.losses for mixture in mixtures(model)))
            if loss.requires_grad:
                loss.backward()
            losses[-1].append(loss.item())
    return losses


def state_of(optimizer, named, kind, momentum):
    """Slots of all parameters; of one that was never updated they are zero."""
    slots = ["exp_avg", "exp_avg_sq"] if kind != "sgd" else ["momentum_buffer"] if momentum != 0 else []

    def value(parameter, slot):
        held = optimizer.state.get(parameter, {}).get(slot)
        return torch.zeros_like(parameter) if held is None else held

    return [(slot, [(name, value(p, slot)) for name, p in named]) for slot in slots]


def train_step(model, optimizer, options, microbatches, divide, clip_norm, norm_order, lr_factor, frozen):
    named = parameters_of(model)
    for name, parameter in named:
        parameter.requires_grad_(name not in frozen)
        parameter.grad = None
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * lr_factor
    for mixture in mixtures(model):
        mixture.counts = torch.zeros_like(mixture.counts)
    losses = backward(model, microbatches)
    trained = [(name, p) for name, p in named if p.requires_grad]
    for _, parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad /= divide
    # A largest magnitude of no elements is an error there.
    counted = [p for _, p in trained if p.numel() > 0]
    norm_max = clip_norm if clip_norm > 0 else math.inf
    norm = nn.utils.clip_grad_norm_(counted, norm_max, norm_type=norm_order, foreach=False)
    gradients = [(name, exported(p.grad)) for name, p in trained]
    optimizer.step()
    for mixture in mixtures(model):
        mixture.move_bias()
    # What never trains beside adapters has no state.
    adapted = any(isinstance(module, Adapted) for module in model.modules())
    with_state = [(name, p) for name, p in named if not adapted or "lora_" in name]
    return {
        "losses": losses,
        "gradient_norm": norm.item(),
        "gradients": gradients,
        "parameters": [(name, exported(p)) for name, p in named],
        "state": [
            (slot, [(name, exported(value)) for name, value in values])
            for slot, values in state_of(optimizer, with_state, options["kind"], options["momentum"])
        ],
    }


def train(kind, model_options, parameters, optimizer_options, steps):
    model = make_model(kind, model_options, parameters)
    optimizer = make_optimizer(parameters_of(model), **optimizer_options)
    return [train_step(model, optimizer, optimizer_options, **step) for step in steps]
