"""The smallest model of each family of `timm`, made smaller still where its class takes sizes."""

from __future__ import annotations

import inspect
import re
from typing import Any, Callable, Optional

import timm
import torch
from torch import nn

from .model import Model, NotBuildable, require_trains, said, tensors_in, without_randomness

CLASSES = 5
PARAMETERS_MAX = 12_000_000
CANDIDATES_MAX = 10
SIDES = (64, 96, 128, 224)
# What stands in the names of small models, the smallest first.
SMALL = tuple(
    "test_ atto femto pico nano xxtiny xtiny xxs tiny _t0 _s0 _b0 050 035 025 _xs mini lite small _s micro b0 18 10".split()
)


def family_of(module: str, name: str) -> str:
    """A module has models of several kinds: resnet.resnext is one of them."""
    word = re.match(r"(test_)?([a-z]+)", name)
    return f"{module}.{word[2]}" if word and word[2] != module else module


def families() -> "dict[str, list[str]]":
    """The models of each family, those first that are small by their names."""

    def score(name: str) -> tuple:
        return min((i for i, word in enumerate(SMALL) if word in name), default=99), len(name), name

    found: "dict[str, list[str]]" = {}
    for module in timm.list_modules():
        for name in sorted(timm.list_models(module=module), key=score):
            found.setdefault(family_of(module, name), []).append(name)
    return found


def names() -> "list[str]":
    return list(families())


def arguments_of(name: str, given: dict) -> dict:
    """What the class of a model is called with, so that it can be called with less."""
    with torch.device("meta"):
        cls = type(timm.create_model(name, pretrained=False, **given))
        called: dict = {}
        init = cls.__init__

        def note(self: Any, *args: Any, **kwargs: Any) -> None:
            if not called:
                called.update(inspect.signature(init).bind(self, *args, **kwargs).arguments)
                called.update(called.pop("kwargs", {}))
            init(self, *args, **kwargs)

        cls.__init__ = note
        try:
            timm.create_model(name, pretrained=False, **given)
        finally:
            cls.__init__ = init
    defaults = {n: each.default for n, each in inspect.signature(init).parameters.items() if each.default is not each.empty}
    return {**defaults, **called}


def smaller(arguments: dict, factor: int) -> dict:
    """Those of the arguments that say how deep and wide a model is, as they become."""
    given: dict = {}
    for name, value in arguments.items():
        depth = re.search(r"depth|layers$|num_blocks|^blocks$", name) is not None
        width = re.search(r"dim|channels|width|planes|filters|hidden", name) is not None and "in_chan" not in name
        if isinstance(value, bool) or not (depth or width):
            continue
        if isinstance(value, int) and value > (2 if depth else 32):
            given[name] = 2 if depth else value // factor
        elif isinstance(value, (tuple, list)) and value and all(type(each) is int for each in value):
            given[name] = type(value)(min(each, 1) if depth else max(each // factor, 1) for each in value)
    return given


def made_smaller(name: str, given: dict) -> "list[dict]":
    """Ways to make a model, the smallest first."""
    try:
        arguments = arguments_of(name, given)
    except Exception:  # the class takes what cannot be seen from outside
        return [given]
    found = [{**given, **smaller(arguments, factor)} for factor in (8, 4, 2, 1)]
    return [each for i, each in enumerate([*found, given]) if each not in found[:i]]


def size_of(name: str, given: dict) -> Optional[int]:
    """How many parameters a model would have. None where only a real one can tell."""
    try:
        with torch.device("meta"):
            model = timm.create_model(name, pretrained=False, num_classes=CLASSES, **given)
            return sum(each.numel() for each in model.parameters())
    except Exception as error:
        if "meta" in str(error):
            return None
        raise


def smallest(candidates: "list[str]") -> "list[str]":
    """By parameters, of those that are small by their names."""
    sized = []
    for name in candidates[:CANDIDATES_MAX]:
        try:
            sized.append((size_of(name, {}) or 10**9, name))
        except Exception:  # it wants more than a name
            continue
    return [name for _, name in sorted(sized)]


def model_of(name: str, given: dict, side: int) -> Model:
    def make() -> nn.Module:
        return without_randomness(timm.create_model(name, pretrained=False, num_classes=CLASSES, **given)).train()

    def batch(n: int) -> tuple:
        rng = torch.Generator().manual_seed(100 + n)
        return torch.randn(2, 3, side, side, generator=rng), torch.tensor([n % CLASSES, 3])

    def loss(model: nn.Module, given: tuple) -> torch.Tensor:
        total: Any = 0.0
        for each in tensors_in(model(given[0])):
            logits = each if each.shape == (2, CLASSES) else each.flatten(1)[:, :CLASSES]
            total = total + nn.functional.cross_entropy(logits, given[1])
        return total

    return Model(make, batch, loss, lambda model, given: tensors_in(model(given[0])))


def ways_of(name: str) -> "list[tuple[dict, int]]":
    """Arguments and the side of the images, the smallest first."""
    own = timm.get_pretrained_cfg(name)
    size = own.input_size[-1] if own is not None else 224
    fixed = bool(own is not None and own.fixed_input_size)
    ways: "list[tuple[dict, int]]" = []
    for image in ({"img_size": 64}, {}, {"img_size": 96}):
        try:
            given = made_smaller(name, image)
        except Exception:
            continue
        sides = [image["img_size"]] if image else [size] if fixed else [side for side in SIDES if side <= max(size, 64)]
        ways += [(each, side) for each in given for side in sides]
    return ways


def first_that_trains(name: str, seconds_left: Callable[[], float]) -> Model:
    reasons = []
    for given, side in ways_of(name):
        try:
            size = size_of(name, given)
            if size is not None and size > PARAMETERS_MAX:
                raise NotBuildable(f"{size:,} parameters")
            model = model_of(name, given, side)
            module = require_trains(model)
            model.about = {"class": name, "parameters": sum(each.numel() for each in module.parameters()), "side": side}
            return model
        except Exception as error:  # of sizes that do not fit
            reasons.append(said(error, 150))
            if seconds_left() < 0:
                break
    raise NotBuildable("; ".join(reasons[-2:]) or "nothing to try")


def build(family: str) -> "list[Model]":
    """The smallest of a family that trains."""
    import time

    start, reasons = time.monotonic(), []
    for name in smallest(families()[family]):
        try:
            return [first_that_trains(name, lambda: 30 - (time.monotonic() - start))]
        except NotBuildable as error:
            reasons.append(f"{name}: {error}")
        if time.monotonic() - start > 30:
            break
    raise NotBuildable("; ".join(reasons[:3]) or "no candidate")
