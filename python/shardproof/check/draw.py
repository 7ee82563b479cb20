"""Named random choices.

A case is nothing but the choices that it made. So a case can be printed as one line, replayed from that line, and shrunk by
making one choice at a time simpler.
"""

from __future__ import annotations

import random
from typing import Any, Callable, Sequence


class Draw:
    """Gives every choice a name and remembers what was chosen.

    Parameters
    ----------
    seed, number
        Which random case this is. A choice depends on the seed, the number and its own name only.
    values
        The choices of an earlier case, name -> index, or those of a line, name -> label. A name that is not there takes its
        simplest value.
    """

    def __init__(self, seed: int = 0, number: int = 0, values: dict[str, int] | dict[str, str] | None = None) -> None:
        self._seed = f"{seed}/{number}/"
        self._fixed = values
        self.indices: dict[str, int] = {}
        self.labels: dict[str, str] = {}
        self.chosen: dict[str, Any] = {}
        self._simplest: dict[str, str] = {}

    def integer(self, name: str, low: int, high: int, chance: float | None = None) -> int:
        """An integer from low to high, both included. Low is the simplest."""
        if high < low:
            raise ValueError(f"draw.integer({name!r}): low {low} is above high {high}")
        value = low + self._index(name, high - low + 1, lambda label: int(label) - low, chance)
        return self._keep(name, value, str(low))

    def choice(
        self,
        name: str,
        options: Sequence[Any],
        chance: float | None = None,
        simplest: Any = None,
        parse: Callable[[str], Any] | None = None,
    ) -> Any:
        """One of the options. The first is the simplest.

        Parameters
        ----------
        chance
            How often it is another one than the first. Without it, all are as likely.
        simplest
            What a line means that lacks the name, if that is not the first of these options.
        parse
            Makes a value of a label that a line has, and none of the options. It may raise ValueError.
        """
        wanted = (self._fixed or {}).get(name)
        labels = [label_of(option) for option in options]
        if parse and isinstance(wanted, str) and wanted not in labels:
            options, labels, self.indices[name] = [_parsed(name, wanted, parse)], [wanted], 0
        at_first = labels[0] if simplest is None else label_of(simplest)
        index = self._index(name, len(options), labels.index, chance, labels.index(at_first) if at_first in labels else 0)
        return self._keep(name, options[index], at_first)

    def flag(self, name: str, chance: float | None = None) -> bool:
        """False or true. False is the simplest."""
        return self.choice(name, (False, True), chance)

    def _index(self, name: str, count: int, parse, chance: float | None, missing: int = 0) -> int:
        if name in self.indices:
            return min(self.indices[name], count - 1)
        if self._fixed is None:
            chances = random.Random(self._seed + name)
            if chance is None or count == 1:
                index = chances.randrange(count)
            else:
                index = chances.randrange(1, count) if chances.random() < chance else 0
        else:
            wanted = self._fixed.get(name, missing)
            index = max(0, min(_parsed(name, wanted, parse) if isinstance(wanted, str) else int(wanted), count - 1))
        self.indices[name] = index
        return index

    def _keep(self, name: str, value: Any, simplest: str) -> Any:
        self.labels[name], self.chosen[name], self._simplest[name] = label_of(value), value, simplest
        return value

    def require_used(self) -> None:
        """Throws for a name of a line that is no choice of its case."""
        unknown = [name for name, wanted in (self._fixed or {}).items() if isinstance(wanted, str) and name not in self.indices]
        if unknown:
            raise ValueError(f"{unknown[0]} is no choice of this case, which has {', '.join(self.indices)}")

    @property
    def line(self) -> str:
        """The case as one line. Choices that are the simplest ones are left out."""
        told = [f"{name}={label}" for name, label in self.labels.items() if label != self._simplest[name]]
        return " ".join(told) or "simplest"


def _parsed(name: str, label: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(label)
    except ValueError:
        raise ValueError(f"{name}={label} is not a choice of this case") from None


def label_of(option: Any) -> str:
    """A short name of an option, without spaces."""
    if option is None:
        return "none"
    if isinstance(option, bool):
        return "yes" if option else "no"
    name = option if isinstance(option, str) else (getattr(option, "__name__", None) or str(option)).removeprefix("torch.")
    return name.replace(" ", "")


def parse_line(line: str) -> dict[str, str]:
    """The choices of a printed case, name -> label."""
    words = [word for word in line.split() if word != "simplest"]
    for word in words:
        if "=" not in word:
            raise ValueError(f"expected name=value, got {word!r}")
    return dict(word.split("=", 1) for word in words)
