"""What `shardproof.verify` is made of: cases, the plain run, the sharded run, and their comparison."""

import torch  # noqa: F401  loads the libraries of the extension module

from .campaign import ProofFailed, Report, verify

__all__ = ["ProofFailed", "Report", "verify"]
