"""`verify`: random cases of a user's own model under this library's strategies, and the smallest failing one."""

from __future__ import annotations

import inspect
import sys
from typing import Any, Callable, Iterable, Optional, Union

import torch
from torch import nn

from .._C import Error
from ..sharding import require_hooks
from ..units import as_list, chosen, tensors_of
from .draw import Draw, parse_line
from .ours import MODES, OPTIMIZERS, RULES, STRATEGIES, Subject
from .runner import Counterexample, Report, run_cases
from .verdict import Verdict
from .witness import Witness


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


def prepare(subject: Subject) -> "list[str]":
    """Throws unless two plain models that are made alike give the same bits, whatever random numbers follow. Returns the
    modules that can be units: those that are called."""
    called: "list[str]" = []
    losses: "list[torch.Tensor]" = []
    facts: "list[dict]" = []
    others: "set[nn.Module]" = set()
    for stream in range(2):
        torch.manual_seed(0)
        model = subject.make_model()
        if not isinstance(model, nn.Module):
            raise Error(f"[verify] make_model returned a {type(model).__name__}, and must return a torch.nn.Module")
        require_hooks(model)
        witness, handles = Witness(model, subject, torch.float32), note_calls(model, called)
        witness.watch()
        torch.manual_seed(stream)
        value, seen = witness.forward("microbatch 0", subject.batch(0))
        for handle in handles:
            handle.remove()
        if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
            raise Error("[verify] the loss must be one number that depends on the model's parameters")
        losses.append(value.detach())
        value.backward()
        # What models share, such as an activation of a whole process, each of them may change.
        parts = model.named_modules(remove_duplicate=False)
        shared = tuple(f"attribute {name}." for name, each in parts if each in others)
        state = {name: fact for name, fact in witness.state().items() if not name.startswith(shared)}
        state["seed of torch's generator"] = torch.initial_seed() == stream or torch.initial_seed()
        facts.append({name: repr(fact) for name, fact in {**seen, **state}.items()})
        others.update(model.modules())
    if not bool(torch.isfinite(losses[0])):
        raise Error(f"[verify] the model's loss on the first batch is {losses[0].item()}, before any training")
    if not torch.equal(*losses):
        drops = [name for name, module in model.named_modules() if "Dropout" in type(module).__name__]
        hint = f" It has dropout at {', '.join(drops[:4])}: make the model with a probability of 0." if drops else ""
        was, then = (each.item() for each in losses)
        raise Error(
            f"[verify] the model's loss on one batch was {was:.9g} and then {then:.9g}. Random models cannot be compared.{hint}"
        )
    subject.ignored = frozenset(name for one, two in (facts, facts[::-1]) for name in one if one[name] != two.get(name))
    return called


def note_calls(model: nn.Module, called: "list[str]") -> list:
    """Hooks that note down the names of modules with parameters that are called and give tensors."""
    names = {id(module): name for name, module in model.named_modules()}

    def note(module, args, result):
        name = names[id(module)]
        if name and name not in called and next(module.parameters(), None) is not None and tensors_of(result):
            called.append(name)

    # A scripted module runs without hooks, so it can be no unit.
    return [each.register_forward_hook(note) for each in model.modules() if not isinstance(each, torch.jit.ScriptModule)]


def sets_of_units(called: "list[str]", units: Optional[Iterable[str]], model: nn.Module) -> "list[str]":
    """The sets of units that are drawn: none, the modules of one class, and single ones."""
    if units is not None:
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
    sets = dict.fromkeys(["", *["+".join(names) for names in by_class.values()], "+".join(called)])
    return sorted(sets, key=lambda names: (names != "", names.count("+")))


def draw_of(line: str) -> Draw:
    """The choices of a line that a report printed, or that somebody wrote. It may raise ValueError."""
    return Draw(values=parse_line(line))


def failure_message(verdict: Verdict, cases: int) -> str:
    """What a failure prints."""
    after = f" after {cases} cases" if cases > 1 else ""
    return (
        f"FAILURE{after}: {verdict.message}\n  minimal  {verdict.line}"
        f"\n  replay   shardproof.verify(make_model, make_batch, ..., case={verdict.line!r})"
        f"\n           under pytest: --shardproof-case {verdict.line!r}"
    )


def require_choices(*, strategies, optimizers, modes: "tuple[str, ...]", ranks_max: int) -> None:
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
        name = text.split("(")[0]
        known = hasattr(torch.optim, name.removeprefix("torch.")) if name.startswith("torch.") else name in RULES
        if "(lr=" not in text and ",lr=" not in text or not text.endswith(")"):
            raise Error(f"[verify] {text!r} is no optimizer with a rate. Write it like {OPTIMIZERS[0]!r} or {OPTIMIZERS[-1]!r}")
        if not known:
            raise Error(f"[verify] there is no optimizer {name!r}. There are {', '.join(RULES)}, and torch.NAME of torch.optim")
    if ranks_max < 2:
        raise Error(f"[verify] ranks_max must be at least 2, got {ranks_max}")


def require_compared(report: Report) -> None:
    """Throws where no case could be compared: nothing that failed is not the same as something that held."""
    if report.compared == 0:
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
    numbered = len(inspect.signature(make_batch).parameters) > 0
    choices = {
        "strategies": STRATEGIES if strategies is None else list(strategies),
        "optimizers": OPTIMIZERS if optimizers is None else list(optimizers),
        "modes": tuple(modes),
        "ranks_max": ranks_max,
    }
    batches = make_batch if numbered else lambda _: make_batch()
    subject = Subject(make_model, batches, loss or default_loss, plan, sequence_dim, seed, **choices)
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)  # more would add in another order
    try:
        require_choices(**choices)
        called = prepare(subject)
        if case is not None:
            report = replayed(subject, case)
        else:
            model = make_model()
            subject.units = sets_of_units(called, units, model)
            subject.specified = all(parameter.dtype == torch.float32 for parameter in model.parameters())
            shows = sys.stderr.isatty() if progress is None else progress
            count, budget = (cases, None) if minutes is None else (None, minutes * 60)
            report = run_cases(subject, count, seed, 1, "here", 1, budget, show if shows else lambda report: None)
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(state)
    if report.failures:
        verdict = report.failures[0].verdict
        raise ProofFailed(failure_message(verdict, report.cases), verdict.line) from verdict.error
    require_compared(report)
    if report.blind:
        raise AssertionError("the comparison did not notice a planted error; this is a bug of shardproof.verify")
    return report


def replayed(subject: Subject, line: str) -> Report:
    """The report on one case."""
    report = Report(subject.name)
    try:
        verdict = subject.tried(draw_of(line))
    except ValueError as error:
        raise Error(f"[verify] this is no case: {line!r}: {error}. Copy the whole line after 'replay' of a report") from None
    report.add(verdict)
    if verdict.kind == "plain":
        raise verdict.error
    if verdict.bad:
        report.failures.append(Counterexample(verdict, verdict.line, 1, 1, "rank-threads"))
    return report


def show(report: Report) -> None:
    """Shows on a terminal how far a run is."""
    rate = report.cases / report.seconds * 60
    print(f"\r\033[K{report.cases} cases, {rate:.0f} a minute, 0 failures\r", end="", file=sys.stderr)
