"""A tiny model of every type of `transformers`, with random inputs by the names in the signature of its forward."""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import signal
import time
from typing import Any, Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch  # noqa: E402
import transformers  # noqa: E402
import transformers.generation  # noqa: E402,F401
import transformers.masking_utils  # noqa: E402,F401
import transformers.modeling_utils  # noqa: E402,F401
from torch import nn  # noqa: E402
from transformers.models.auto import configuration_auto, modeling_auto  # noqa: E402

from .model import Model, NotBuildable, loss_of_outputs, require_trains, said, tensors_in, without_randomness  # noqa: E402
from .tiny import VOCABULARY, configs  # noqa: E402

PARAMETERS_MAX = 16_000_000
LENGTH = 12
# The heads that a type is tried with, in this order: those that generate first.
HEADS = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "IMAGE_TEXT_TO_TEXT", "IMAGE_CLASSIFICATION")
GENERATES = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SPEECH_SEQ_2_SEQ")
VARIANTS = 3  # of the shapes of inputs
SECONDS_EACH, SECONDS_ALL = 8, 25  # of the processor


def _mappings() -> "dict[str, dict]":
    names = [n for n in vars(modeling_auto) if n.startswith("MODEL_FOR_") and n.endswith("_MAPPING_NAMES")]
    found = {name[len("MODEL_FOR_") : -len("_MAPPING_NAMES")]: getattr(modeling_auto, name) for name in names}
    first = {head: found.pop(head) for head in HEADS}
    return {**first, "": modeling_auto.MODEL_MAPPING_NAMES, **found}


MAPPINGS = _mappings()


def names() -> "list[str]":
    return list(configuration_auto.CONFIG_MAPPING_NAMES)


def classes_of(kind: str) -> "Iterator[tuple[str, type]]":
    """The heads of a type, each with its class."""
    seen = set()
    for head, mapping in MAPPINGS.items():
        given = mapping.get(kind)
        for name in [given] if isinstance(given, str) else given or ():
            cls = getattr(transformers, name, None)
            if cls is not None and cls not in seen:
                seen.add(cls)
                yield head, cls
    if not seen:  # a part of other models
        config = transformers.CONFIG_MAPPING[kind]
        module = importlib.import_module(config.__module__.replace(".configuration_", ".modeling_"))
        for cls in vars(module).values():
            if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel) and cls.config_class is config:
                yield "", cls


def number(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these fields that has a value."""
    return next((value for name in names for value in [getattr(config, name, None)] if value is not None), default)


class Inputs:
    """Random inputs of a model. A variant is a guess at their shapes."""

    def __init__(self, model: nn.Module, head: str, n: int, variant: int):
        self.model, self.head, self.variant, self.config = model, head, variant, model.config
        self.text = self.config.get_text_config()
        self.vision = number(self.config, "vision_config", "backbone_config", default=self.config)
        self.rng = torch.Generator().manual_seed(100 + n)
        self.n = n
        self.names = inspect.signature(model.forward).parameters
        self.main = getattr(model, "main_input_name", "input_ids")

    def ids(self, length: int) -> torch.Tensor:
        vocabulary = number(self.text, "vocab_size") or number(self.config, "vocab_size") or VOCABULARY
        top = vocabulary if isinstance(vocabulary, int) else VOCABULARY
        return torch.randint(3, max(min(100, top), 4), (2, length), generator=self.rng)

    def noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.rng)

    def pixels(self) -> torch.Tensor:
        size = number(self.vision, "image_size", "img_size", default=64)
        size = tuple(size) if isinstance(size, (list, tuple)) else (size, size)
        size = size if all(isinstance(each, int) for each in size) else (64, 64)
        channels = number(self.vision, "num_channels", "in_channels", "in_chans", default=3)
        channels = channels if isinstance(channels, int) else 3
        frames = number(self.config, "num_frames", "frames_per_clip", "video_length")
        if self.variant == 1 and not isinstance(frames, int):
            frames = 2
        return self.noise(2, *([frames] if isinstance(frames, int) and self.variant < 2 else []), channels, *size)

    def patches(self, given: dict, name: str) -> None:
        """Of images that lie behind each other, 4 x 4 patches each."""
        patch = number(self.vision, "patch_size", default=8)
        channels = number(self.vision, "in_channels", "num_channels", default=3)
        frames = 1 if self.variant else number(self.vision, "temporal_patch_size", default=1)
        given[name] = self.noise(32, (channels if isinstance(channels, int) else 3) * patch * patch * frames)
        given["grid_thw"] = torch.tensor([[1, 4, 4], [1, 4, 4]])

    def sounds(self, given: dict) -> None:
        if self.main == "input_values":
            mels = number(self.config, "num_mel_bins", default=128)
            shapes = ((2, 4000), (2, 1, 3200), (2, number(self.config, "max_length", default=64), mels))
            given["input_values"] = self.noise(*shapes[self.variant])
        if self.main == "input_features":
            audio = number(self.config, "audio_config", "encoder_config", default=self.config)
            bins = number(audio, "num_mel_bins", "feature_size", "input_dim", "input_feat_per_channel", default=80)
            length = min(2 * number(audio, "max_source_positions", default=20), 512)
            given["input_features"] = self.noise(2, length, bins) if self.variant else self.noise(2, bins, length)
            if "input_features_mask" in self.names:
                given["input_features_mask"] = torch.ones(2, length, dtype=torch.long)

    def labels(self, given: dict) -> None:
        if self.head in ("CAUSAL_LM", "MASKED_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM") and "input_ids" in given:
            given["labels"] = given["input_ids"].clone()
        elif self.head in ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ"):
            given["labels"] = self.ids(9)
        elif self.head.endswith("_CLASSIFICATION") and self.head not in ("TOKEN_CLASSIFICATION", "TIME_SERIES_CLASSIFICATION"):
            given["labels"] = torch.tensor([self.n % 2, 1])

    def made(self) -> dict:
        given: dict = {}
        named = inspect.Parameter.POSITIONAL_OR_KEYWORD
        needed = {name for name, each in self.names.items() if each.default is each.empty and each.kind == named}
        of_pixels = self.main == "pixel_values"
        if "input_ids" in self.names and (self.main == "input_ids" or (of_pixels and "CLASSIFICATION" not in self.head)):
            given["input_ids"] = self.ids(LENGTH)
            if "attention_mask" in self.names:
                given["attention_mask"] = torch.ones(2, LENGTH, dtype=torch.long)
        if "decoder_input_ids" in self.names and number(self.config, "is_encoder_decoder", default=False):
            given["decoder_input_ids"] = self.ids(9)
        if "pixel_values" in self.names and (of_pixels or "pixel_values" in needed or (self.variant and not self.head)):
            given["pixel_values"] = self.pixels()
        if "grid_thw" in self.names:
            self.patches(given, "hidden_states" if "hidden_states" in self.names else "pixel_values")
        self.sounds(given)
        if "labels" in self.names:
            self.labels(given)
        for name in needed - given.keys():
            given[name] = self.by_name(name)
        if not given:
            raise NotBuildable(f"no inputs are known for {type(self.model).__name__}, whose main one is {self.main}")
        return given

    def by_name(self, name: str) -> torch.Tensor:
        """An input that has no default."""
        if name.endswith("input_ids"):
            return self.ids(LENGTH)
        if name.endswith("attention_mask"):
            return torch.ones(2, LENGTH, dtype=torch.long)
        if name.startswith("pixel_values"):
            return self.pixels()
        if name in ("hidden_states", "inputs_embeds", "encoder_hidden_states", "inputs"):
            return self.noise(2, LENGTH, number(self.config, "hidden_size", "d_model", "d_latents", default=32))
        raise NotBuildable(f"no input is known for {name} of {type(self.model).__name__}")


def output_tensors(output: Any) -> "list[torch.Tensor]":
    """What a forward gave, without its caches."""
    if hasattr(output, "items"):
        held = (torch.Tensor, tuple, list)
        output = {k: v for k, v in output.items() if "cache" not in k and "past" not in k and isinstance(v, held)}
    return tensors_in(output)


def loss_of(model: nn.Module, batch: dict) -> torch.Tensor:
    output = model(**batch)
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and (loss.requires_grad or not torch.is_grad_enabled()):
        return loss.reshape(())
    return loss_of_outputs(output_tensors(output))


def generated(model: nn.Module, batch: dict) -> torch.Tensor:
    given = {key: batch[key] for key in ("input_ids", "attention_mask", "input_features", "input_values") if key in batch}
    return model.generate(**given, max_new_tokens=6, min_new_tokens=6, do_sample=False, use_cache=True, pad_token_id=0)


def size_of(cls: type, config: Any) -> int:
    """How many parameters a model would have; 0 where only a real one can tell."""
    try:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in cls(copy.deepcopy(config)).parameters())
    except Exception as error:
        if "meta" in str(error):
            return 0
        raise


def model_of(cls: type, config: Any, head: str, variant: int) -> Model:
    def make() -> nn.Module:
        return without_randomness(cls(copy.deepcopy(config))).float().train()

    torch.manual_seed(5)
    first, batches = make(), {}

    def batch(n: int) -> dict:
        if n not in batches:
            batches[n] = Inputs(first, head, n, variant).made()
        return {name: value.clone() for name, value in batches[n].items()}

    return Model(make, batch, loss_of, lambda model, given: output_tensors(model(**given)), about={"class": cls.__name__})


def _add_generate(model: Model, module: nn.Module) -> None:
    """Lets a model generate, if the plain one does and gives the same tokens twice."""
    module.eval()
    try:
        with torch.no_grad():
            if torch.equal(*(generated(module, model.batch(0)) for _ in range(2))):
                model.generate = generated
    except Exception as error:  # whatever generate does not take
        model.about["generate"] = said(error, 120)


def build(kind: str) -> "list[Model]":
    """The first class, config and inputs of a type with which it trains."""
    reasons: "list[str]" = []

    def stop(*_: Any) -> None:
        raise NotBuildable(f"more than {SECONDS_EACH} s")

    signal.signal(signal.SIGVTALRM, stop)
    begin = time.process_time()
    for head, cls in classes_of(kind):
        for config in configs(kind):
            signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS_EACH)
            try:
                if isinstance(config, Exception):
                    raise config
                size = size_of(cls, config)
                if size > PARAMETERS_MAX:
                    raise NotBuildable(f"{size:,} parameters")
                for variant in range(VARIANTS):
                    try:
                        model = model_of(cls, config, head, variant)
                        module = require_trains(model)
                        break
                    except Exception as error:
                        if variant + 1 == VARIANTS or "more than" in str(error):
                            raise
                        reasons.append(f"{cls.__name__}: {said(error, 200)}")
                if head in GENERATES and hasattr(module, "generate"):
                    _add_generate(model, module)
                model.about["parameters"] = sum(parameter.numel() for parameter in module.parameters())
                return [model]
            except Exception as error:
                reasons.append(f"{cls.__name__}: {said(error, 200)}")
                if time.process_time() - begin > SECONDS_ALL:
                    raise NotBuildable("; ".join(list(dict.fromkeys(reasons))[:4])) from error
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    raise NotBuildable("; ".join(list(dict.fromkeys(reasons))[:4]) or "no class")
