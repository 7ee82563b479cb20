"""The source of functions with all that they use, so that it can stand in a script by itself."""

from __future__ import annotations

import inspect
import textwrap
import types
from typing import Any

OWN = ("shardproof.check.draw", "shardproof.check.plan")


def sources(functions: list[Any]) -> tuple[list[str], list[str]]:
    """The imports that the functions need, and their sources in an order that works."""
    imports: dict[str, None] = {}
    texts: dict[str, str] = {}
    for function in functions:
        _visit(function, imports, texts)
    return list(imports), list(texts.values())


def _visit(thing: Any, imports: dict[str, None], texts: dict[str, str]) -> None:
    name = thing.__name__
    if name in texts or thing.__module__ in OWN:
        return
    try:
        text = textwrap.dedent(inspect.getsource(thing))
    except (OSError, TypeError):
        imports[f"from {thing.__module__} import {name}"] = None
        return
    texts[name] = ""  # so that a function that calls itself ends
    names = getattr(inspect.getmodule(thing), "__dict__", {})
    for used in sorted(_names(thing)):
        value = names.get(used)
        if isinstance(value, types.ModuleType):
            _import_module(value, used, imports)
        elif inspect.isfunction(value) or inspect.isclass(value):
            if value.__module__ == thing.__module__ or value.__module__.startswith("shardproof"):
                _visit(value, imports, texts)
            else:
                imports[
                    f"from {value.__module__} import {value.__name__}" + ("" if used == value.__name__ else f" as {used}")
                ] = None
        elif used in names and isinstance(value, (int, float, str, tuple, list, dict)) and not used.startswith("__"):
            texts.setdefault(used, f"{used} = {value!r}\n")
    del texts[name]
    texts[name] = text


def _import_module(module: types.ModuleType, used: str, imports: dict[str, None]) -> None:
    if module.__name__ == used:
        imports[f"import {used}"] = None
    else:
        imports[f"import {module.__name__} as {used}"] = None


def _names(thing: Any) -> set[str]:
    """Global names that a function or class uses."""
    if inspect.isclass(thing):
        found = {base.__name__ for base in thing.__bases__ if base is not object}
        found |= {part for base in thing.__bases__ for part in base.__module__.split(".")[:1]}
        for value in vars(thing).values():
            if inspect.isfunction(value):
                found |= _names(value)
        words = inspect.getsource(thing).splitlines()[0]
        return found | {word for word in words.replace("(", " ").replace(")", " ").replace(".", " ").replace(":", " ").split()}
    return _code_names(thing.__code__)


def _code_names(code: types.CodeType) -> set[str]:
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _code_names(constant)
    return found
