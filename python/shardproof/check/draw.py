"""Named random choices.

A case is nothing but the choices that it made. So a case can be printed as one line, replayed from that line, and shrunk by
making one choice at a time simpler.
"""

from __future__ import annotations

import random
from typing import Any, Sequence


class Draw:
    """Gives every choice a name and remembers what was chosen.

    Parameters
    ----------
    seed, number
        Which random case this is. A choice depends on the seed, the number and its own name only.
    values
        The choices of an earlier case, name -> index. A name that is not there takes its simplest value.
    """

    def __init__(self, seed: int = 0, number: int = 0, values: dict[str, int] | None = None) -> None:
        self._seed = f"{seed}/{number}/"
        self._fixed = values
        self.indices: dict[str, int] = {}
        self.labels: dict[str, str] = {}
        self.chosen: dict[str, Any] = {}

    def integer(self, name: str, low: int, high: int) -> int:
        """An integer from low to high, both included. Low is the simplest."""
        if high < low:
            raise ValueError(f"draw.integer({name!r}): low {low} is above high {high}")
        value = low + self._index(name, high - low + 1, lambda label: int(label) - low)
        return self._keep(name, value, str(value))

    def choice(self, name: str, options: Sequence[Any]) -> Any:
        """One of the options. The first is the simplest."""
        labels = [label_of(option) for option in options]
        value = options[self._index(name, len(options), labels.index)]
        return self._keep(name, value, label_of(value))

    def flag(self, name: str) -> bool:
        """False or true. False is the simplest."""
        return self.choice(name, (False, True))

    def _index(self, name: str, count: int, parse) -> int:
        if name in self.indices:
            return min(self.indices[name], count - 1)
        if self._fixed is None:
            index = random.Random(self._seed + name).randrange(count)
        else:
            wanted = self._fixed.get(name, 0)
            if isinstance(wanted, str):
                try:
                    wanted = parse(wanted)
                except ValueError:
                    raise ValueError(f"{name}={wanted} is not a choice of this case") from None
            index = max(0, min(int(wanted), count - 1))
        self.indices[name] = index
        return index

    def _keep(self, name: str, value: Any, label: str) -> Any:
        self.labels[name] = label
        self.chosen[name] = value
        return value

    @property
    def line(self) -> str:
        """The case as one line. Choices that are the simplest ones are left out."""
        return " ".join(f"{name}={self.labels[name]}" for name, index in self.indices.items() if index) or "simplest"


def label_of(option: Any) -> str:
    """A short name of an option, without spaces."""
    if option is None:
        return "none"
    if isinstance(option, bool):
        return "yes" if option else "no"
    name = getattr(option, "__name__", None) or str(option)
    return name.removeprefix("torch.").replace(" ", "")


def parse_line(line: str) -> dict[str, str]:
    """The choices of a printed case, name -> label."""
    words = [word for word in line.split() if word != "simplest"]
    for word in words:
        if "=" not in word:
            raise ValueError(f"expected name=value, got {word!r}")
    return dict(word.split("=", 1) for word in words)
