"""What `shardproof.verify` is made of: cases, the plain run, the sharded run, and their comparison."""

import torch  # noqa: F401  loads the libraries of the extension module

from .campaign import ProofFailed, Report, Verdict, prepare, try_case, verify
from .case import Case, draw_case, parse_case
from .trained import Subject

__all__ = ["Case", "ProofFailed", "Report", "Subject", "Verdict", "draw_case", "parse_case", "prepare", "try_case", "verify"]
