"""A test of your own model, an image net, and a language model of Hugging Face: pytest examples/python."""

import torch
from torch import nn

import shardproof


class MyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 1)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def test_my_model_trains_the_same_when_it_is_sharded():
    shardproof.verify(MyModel, lambda: torch.randn(4, 16), lambda model, x: model(x).square().mean())


def test_an_image_net_trains_the_same_when_it_is_sharded():
    def make():
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))

    def images():
        return torch.randn(4, 3, 8, 8), torch.randint(0, 10, (4,))

    shardproof.verify(make, images, lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]), cases=20)


def test_a_model_of_hugging_face_trains_the_same_when_it_is_sharded():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, use_cache=False
    )

    def tokens():
        ids = torch.randint(0, 31, (2, 8))
        return {"input_ids": ids, "labels": ids}

    shardproof.verify(lambda: LlamaForCausalLM(config), tokens, units=["model.layers.*"], cases=10)
