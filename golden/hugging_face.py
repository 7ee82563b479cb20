"""The language models of the transformers package on given weights: logits and gradients.

Embedded into the library at build time, as oracle.py is, whose forms of tensors these are. Gradients go by the names,
and have the shapes, of the weights that were given.
"""

import json

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

# Of texts that these models have none of.
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None}
# Experts by the formula: the package's grouped product takes no widths but multiples of 16 bytes.
IMPLEMENTATIONS = {"attn_implementation": "sdpa", "experts_implementation": "eager"}


def tensor(given, dtype):
    buffer, kind, shape = given
    values = torch.frombuffer(buffer, dtype=getattr(torch, kind)).reshape(shape)
    return values.to(dtype) if values.is_floating_point() else values.clone()


def exported(values):
    out = bytearray(8 * values.numel())
    torch.frombuffer(out, dtype=torch.float64).copy_(values.detach().flatten())
    return bytes(out), list(values.shape)


def weights_of(model):
    """(name without the base model's prefix of GPT-2, parameter as outputs x inputs); a Conv1D has inputs x outputs."""
    turned = {name + ".weight" for name, module in model.named_modules() if isinstance(module, Conv1D)}
    for name, parameter in model.named_parameters():
        yield name.removeprefix("transformer."), parameter, name in turned


def run(config, parameters, tokens, targets, dtype):
    config = AutoConfig.for_model(**{**json.loads(config), **NO_TOKENS})
    dtype = getattr(torch, dtype)
    with torch.random.fork_rng(devices=[]):  # C++ shares the generator
        model = AutoModelForCausalLM.from_config(config, **IMPLEMENTATIONS).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)  # and no buffer: frequencies stay float32, as from_pretrained has them
    own = {name: (parameter, turned) for name, parameter, turned in weights_of(model)}
    own.update((name, (buffer, False)) for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias"))
    names = [name for name, _ in parameters]
    if sorted(own) != sorted(names):
        raise ValueError(f"the package's model has the parameters {list(own)}, given were {names}")
    with torch.no_grad():
        for name, value in parameters:
            parameter, turned = own[name]
            value = tensor(value, parameter.dtype)
            parameter.copy_(value.mT if turned else value)
    logits = model(input_ids=tensor(tokens, dtype)).logits
    wide = logits if dtype == torch.float64 else logits.float()  # as the package's own loss
    F.cross_entropy(wide.flatten(0, 1), tensor(targets, dtype).flatten(), reduction="sum").backward()
    gradients = [(name, exported(p.grad.mT if turned else p.grad)) for name in names for p, turned in [own[name]]
                 if p.requires_grad]
    return {"logits": exported(logits), "gradients": gradients}
