"""What programs for other libraries share: ranks of one job, and a small model with its data."""

import os
import sys

import torch

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, os.pardir, "ci", "tests"))
from peer_ranks import join, leave  # noqa: E402, F401


def begin(whose):
    """Joins the ranks, before the program imports what imports FSDP2. "ours": FSDP2's names are this library's."""
    if whose == "ours":
        import shardproof.fsdp

        shardproof.fsdp.patch_torch()
    os.environ["MASTER_ADDR"] = "127.0.0.1"  # Accelerate asks for it, though the process group is there
    return join()


def let_a_cpu_have_fsdp():
    """Accelerate leaves its plugin out on a CPU. It knows that by the name of the kind of ranks alone."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def model_of(tied=False):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def samples(count):
    tokens = (torch.randint(0, 64, (12,), generator=torch.Generator().manual_seed(i)) for i in range(count))
    return [{"input_ids": each, "labels": each} for each in tokens]
