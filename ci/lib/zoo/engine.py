"""A case by the engine of `shardproof.verify`, and how it ended."""

from __future__ import annotations

import dataclasses
from typing import Optional

from shardproof.proof.campaign import require_repeatable as prepare
from shardproof.proof.campaign import sets_of_units
from shardproof.proof.case import Case, draw_case, parse_case
from shardproof.proof.trained import Differs, Diverged, Subject, Trainer

__all__ = ["Subject", "Verdict", "draw_case", "parse_case", "prepare", "sets_of_units", "try_case"]


@dataclasses.dataclass
class Verdict:
    """How a case ended: it "held", a value "differs", only the sharded run "raised", or the plain one "diverged"."""

    kind: str
    detail: str = ""
    error: Optional[Exception] = None
    values: int = 0


def try_case(subject: Subject, case: Case) -> Verdict:
    trainer = Trainer(case, subject)
    try:
        trainer.run()
    except Diverged:
        return Verdict("diverged")
    except Differs as error:
        return Verdict("differs", str(error))
    except Exception as error:  # whatever a model raises only when it is sharded
        return Verdict("raised", error=error)
    return Verdict("held", values=trainer.values)
