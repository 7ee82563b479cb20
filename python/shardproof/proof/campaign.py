"""`verify`: random cases of a user's own model, the smallest failing one, and the report."""

from __future__ import annotations

import dataclasses
import inspect
import random
import sys
import time
import traceback
from typing import Any, Callable, Iterable, Optional, Union

import torch
from torch import nn

from .._C import Error
from ..units import tensors_of
from .case import MODES, OPTIMIZERS, RULES, STRATEGIES, Case, draw_case, parse_call, parse_case, smaller
from .trained import Differs, Diverged, Subject, Trainer

SHRINK_RUNS_MAX = 80


class ProofFailed(AssertionError):
    """A case in which the sharded model did not train what the plain model trains.

    Attributes
    ----------
    case : str
        The smallest failing case that was found; ``verify(..., case=...)`` runs it again.
    """

    def __init__(self, message: str, case: str):
        super().__init__(message)
        self.case = case


@dataclasses.dataclass
class Report:
    """What `verify` did."""

    cases: int = 0
    diverged: int = 0
    values: int = 0
    seconds: float = 0.0
    farthest: float = 0.0
    rows: "dict[tuple[str, int], int]" = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        lines = ["strategy   world  cases  failures"]
        lines += [f"{name:<10} {world:>5} {count:>6}         0" for (name, world), count in sorted(self.rows.items())]
        lines.append(f"compared: {self.values} values; fast mode: at most {self.farthest:.2f} times the plain runs' distance")
        if self.diverged:
            lines.append(f"{self.diverged} cases diverged, or could not be computed, without sharding, and show nothing")
        rate = self.cases / self.seconds * 60 if self.seconds else 0
        held = self.cases - self.diverged
        lines.append(f"ALL HELD: {held} of {held} cases held, in {self.seconds:.1f} s ({rate:.0f} cases a minute)")
        return "\n".join(lines)


def default_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """``model(**batch)``, ``model(*batch)`` or ``model(batch)``, and ``.loss`` of what it returns if it has one."""
    if isinstance(batch, dict) or hasattr(batch, "keys"):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    loss = getattr(output, "loss", output)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise Error(
            f"[verify] the model returned a {type(output).__name__} and no loss. Give verify a loss: "
            "loss=lambda model, batch: ... one number"
        )
    return loss


def batches_of(make_batch: Callable, seed: int) -> Callable[[int], Any]:
    """Batch number n, made once. make_batch takes the number, or nothing and draws from torch's generator."""
    takes_number = len(inspect.signature(make_batch).parameters) > 0
    made: dict = {}

    def batch(number):
        if number not in made:
            torch.manual_seed(seed * 1_000_003 + number)
            made[number] = make_batch(number) if takes_number else make_batch()
        return made[number]

    return batch


def require_repeatable(subject: Subject) -> "list[str]":
    """Throws unless a forward gives the same bits twice. Returns the modules that can be units: those that are called."""
    torch.manual_seed(0)
    model, called = subject.make_model(), []
    if not isinstance(model, nn.Module):
        raise Error(f"[verify] make_model returned a {type(model).__name__}, and must return a torch.nn.Module")
    names = {id(module): name for name, module in model.named_modules()}

    def note(module, args, kwargs, result):
        name = names[id(module)]
        if name and name not in called and next(module.parameters(), None) is not None and tensors_of(result):
            called.append(name)

    handles = [module.register_forward_hook(note, with_kwargs=True) for module in model.modules()]
    batch = subject.batch(0)
    first = subject.loss(model, batch)
    for handle in handles:
        handle.remove()
    if not isinstance(first, torch.Tensor) or first.numel() != 1 or not first.requires_grad:
        raise Error("[verify] the loss must be one number that depends on the model's parameters")
    if not bool(torch.isfinite(first)):
        raise Error(f"[verify] the model's loss on the first batch is {first.item()}, before any training")
    second = subject.loss(model, batch)
    if not torch.equal(first.detach(), second.detach()):
        drops = [name for name, module in model.named_modules() if "Dropout" in type(module).__name__]
        hint = f" It has dropout at {', '.join(drops[:4])}: make the model with a probability of 0." if drops else ""
        raise Error(
            f"[verify] the model's loss on one batch was {first.item():.9g} and then {second.item():.9g}. Random models cannot "
            f"be compared.{hint}"
        )
    return called


def sets_of_units(called: "list[str]", units: Optional[Iterable[str]], model: nn.Module) -> "list[str]":
    """The sets of units that are drawn: none, the modules of one class, and single ones."""
    if units is not None:
        from ..units import as_list, chosen

        named = [(name, module) for name, module in model.named_modules() if name]
        names = {id(module): name for name, module in named}
        chosen_names = [
            names[id(module)] for selector in as_list(units) for group in chosen(selector, named) for module in group
        ]
        return ["", "+".join(dict.fromkeys(chosen_names))]
    modules = dict(model.named_modules())
    by_class: "dict[str, list[str]]" = {}
    for name in called:
        by_class.setdefault(type(modules[name]).__name__, []).append(name)
    sets = ["", *["+".join(names) for names in by_class.values()], "+".join(called)]
    return list(dict.fromkeys(sets))


def outcome_of(case: Case, subject: Subject, report: Optional[Report]) -> Optional[str]:
    """None when the case holds, else what is wrong."""
    trainer = Trainer(case, subject)
    try:
        trainer.run()
    except Diverged:
        if report:
            report.diverged += 1
        return None
    except Differs as error:
        return str(error)
    except Exception as error:  # noqa: B902  whatever a user's model raises only when it is sharded
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} (at {last.filename.rsplit('/', 1)[-1]}:{last.lineno})"
    if report:
        report.values += trainer.values
        report.farthest = max(report.farthest, trainer.farthest)
    return None


def shrunk(case: Case, why: str, subject: Subject) -> "tuple[Case, str]":
    """The smallest failing case that simplifying this one leads to, and what is wrong with it."""
    runs, found = 0, True
    while found and runs < SHRINK_RUNS_MAX:
        found = False
        for candidate in smaller(case):
            runs += 1
            says = outcome_of(candidate, subject, None)
            if says is not None:
                case, why, found = candidate, says, True
                break
            if runs >= SHRINK_RUNS_MAX:
                break
    return case, why


def failure_message(why: str, case: Case, cases: int) -> str:
    """What a failure prints."""
    after = f" after {cases} cases" if cases > 1 else ""
    return (
        f"FAILURE{after}: {why}\n  minimal  {case}"
        f"\n  replay   shardproof.verify(make_model, make_batch, ..., case={str(case)!r})"
        f"\n           under pytest: --shardproof-case {str(case)!r}"
    )


def require_choices(strategies, optimizers, modes: "tuple[str, ...]", ranks_max: int) -> None:
    """Throws for a choice that there is not, and names those there are."""
    for name in strategies or ():
        if name not in STRATEGIES:
            raise Error(f"[verify] there is no strategy {name!r}. There are {', '.join(STRATEGIES)}")
    for mode in modes:
        if mode not in MODES:
            raise Error(f"[verify] there is no mode {mode!r}. There are {', '.join(MODES)}")
    for what, given in (("strategies", strategies), ("optimizers", optimizers), ("modes", modes)):
        if given is not None and not given:
            raise Error(f"[verify] {what} is empty, so there is nothing to draw. Name one, or leave it out")
    for text in optimizers or ():
        try:
            name, settings = parse_call(text)
        except ValueError:
            name, settings = "", {}
        if "lr" not in settings:
            raise Error(f"[verify] {text!r} is no optimizer with a rate. Write it like {OPTIMIZERS[0]!r} or {OPTIMIZERS[-1]!r}")
        known = hasattr(torch.optim, name[len("torch.") :]) if name.startswith("torch.") else name in RULES
        if not known:
            raise Error(f"[verify] there is no optimizer {name!r}. There are {', '.join(RULES)}, and torch.NAME of torch.optim")
    if ranks_max < 2:
        raise Error(f"[verify] ranks_max must be at least 2, got {ranks_max}")


def require_compared(report: Report) -> None:
    """Throws where no case could be compared: nothing that failed is not the same as something that held."""
    if report.values == 0:
        raise Error(
            f"[verify] of {report.cases} cases {report.diverged} diverged, or could not be computed, without sharding, so "
            "nothing was compared. Choose a smaller learning rate (optimizers), other data, or more cases"
        )


# What the pytest plugin sets from its options.
defaults: "dict[str, Any]" = {"cases": 50, "minutes": None, "seed": None, "case": None}


def verify(
    make_model: Callable[[], nn.Module],
    make_batch: Callable[..., Any],
    loss: Optional[Callable[[nn.Module, Any], torch.Tensor]] = None,
    *,
    cases: Optional[int] = None,
    minutes: Optional[float] = None,
    seed: Optional[int] = None,
    case: Optional[str] = None,
    ranks_max: int = 4,
    strategies: Optional[Iterable[str]] = None,
    units: Any = None,
    optimizers: Optional[Iterable[str]] = None,
    modes: Iterable[str] = MODES,
    plan: Optional[dict] = None,
    sequence_dim: Optional[int] = None,
    progress: Union[bool, None] = None,
) -> Report:
    """Prove that a model trains the same when it is sharded: random cases of it beside plain PyTorch.

    A case is a mesh of rank-threads, a strategy with options, units, an optimizer, and a history of steps, accumulation,
    freezing, saves and loads. In mode "ordered" every loss, gradient, norm, parameter and optimizer state has to have the bits
    of a plain run that takes sums in the specified order. In mode "canonical" gradients are summed in fixed point, and bits do
    not depend on any order. In mode "fast" sums are taken in another order, and values may be 8 times as far from a run in
    float64 as plain runs are.

    Parameters
    ----------
    make_model : callable
        Returns the model; called often, always after the same ``torch.manual_seed``.
    make_batch : callable
        Returns a batch; takes its number, or nothing, and then draws from torch's generator.
    loss : callable, optional
        ``loss(model, batch)``, a mean over the batch. Without one, what the model returns, or its ``.loss``.
    cases : int, optional
        How many cases are drawn. 50 without it.
    minutes : float, optional
        Draw cases for so long instead.
    seed : int, optional
        Of the draws. Without it 0.
    case : str, optional
        Run this one case, which a report printed.
    ranks_max : int
        The largest number of ranks of a mesh, at least 2.
    strategies : iterable of str, optional
        Only these.
    units : as of `fully_shard`, optional
        Only these are units, or none. Without it, modules that the model calls.
    optimizers : iterable of str, optional
        Only these, e.g. ``"adamw(lr=0.01)"`` or ``"torch.SGD(lr=0.1)"``.
    modes : iterable of str
        Of "ordered", "canonical" and "fast".
    plan : dict, optional
        As of `parallelize`. With it, some cases in mode "fast" cut the model over two ranks by tensor parallelism.
    sequence_dim : int, optional
        As of `parallelize`.
    progress : bool, optional
        Whether progress is printed. By default on a terminal.

    Returns
    -------
    Report
        The number of cases and values.

    Raises
    ------
    ProofFailed
        With the value that differs first, the smallest case that shows it, and the line that replays it.

    Examples
    --------
    >>> def test_my_model_trains_the_same_when_it_is_sharded():
    ...     shardproof.verify(MyModel, lambda: torch.randn(4, 16), lambda model, x: model(x).square().mean())
    """
    cases = cases if cases is not None else defaults["cases"]
    minutes = minutes if minutes is not None else defaults["minutes"]
    seed = seed if seed is not None else defaults["seed"] or 0
    case = case if case is not None else defaults["case"]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more would add in another order
    state = torch.get_rng_state()
    try:
        return _verify(
            make_model,
            Subject(make_model, batches_of(make_batch, seed), loss or default_loss, plan, sequence_dim),
            cases,
            minutes,
            seed,
            case,
            ranks_max,
            None if strategies is None else list(strategies),
            units,
            None if optimizers is None else list(optimizers),
            tuple(modes),
            progress,
        )
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(state)


def _verify(
    make_model, subject, cases, minutes, seed, case, ranks_max, strategies, units, optimizers, modes, progress
) -> Report:
    require_choices(strategies, optimizers, modes, ranks_max)
    report, start = Report(), time.monotonic()
    called = require_repeatable(subject)
    if case is not None:
        given = parse_case(case)
        why = outcome_of(given, subject, report)
        if why is not None:
            raise ProofFailed(failure_message(why, given, 1), str(given))
        report.cases, report.rows = 1, {(given.strategy, given.world): 1}
        require_compared(report)
        report.seconds = time.monotonic() - start
        return report
    sets = sets_of_units(called, units, make_model())
    rng = random.Random(seed)
    shows = progress if progress is not None else sys.stderr.isatty()
    while report.cases < cases if minutes is None else time.monotonic() - start < minutes * 60:
        drawn = draw_case(
            rng,
            sets,
            strategies=strategies,
            optimizers=optimizers,
            modes=modes,
            ranks_max=ranks_max,
            tensor_parallel=subject.plan is not None,
        )
        report.cases += 1
        why = outcome_of(drawn, subject, report)
        if why is not None:
            smallest, why = shrunk(drawn, why, subject)
            raise ProofFailed(failure_message(why, smallest, report.cases), str(smallest))
        row = (drawn.strategy, drawn.world)
        report.rows[row] = report.rows.get(row, 0) + 1
        report.seconds = time.monotonic() - start
        if shows:
            print(
                f"\r{report.cases} cases, {report.cases / report.seconds * 60:.0f} a minute, 0 failures",
                end="",
                file=sys.stderr,
            )
    if shows:
        print("\r\033[K", end="", file=sys.stderr)
    require_compared(report)
    return report
