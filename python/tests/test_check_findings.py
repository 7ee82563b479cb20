"""Findings in other engines hold with the torch that is installed: as plain scripts, and by the lines that found them."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

import shardproof.check as check
from shardproof.check.engines import with_known

FINDINGS = pathlib.Path(__file__).resolve().parents[2] / "docs" / "findings"
LINE = re.compile(r"--engine (\S+) --all --replay '([^']*)'")


@pytest.mark.parametrize("script", sorted(FINDINGS.glob("[0-9]*.py")), ids=lambda path: path.stem)
def test_a_finding_holds_as_a_plain_script(script):
    assert "shardproof" not in script.read_text()
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1 and "the finding holds" in ended.stdout + ended.stderr, ended.stdout + ended.stderr


@pytest.mark.parametrize("text", sorted(FINDINGS.glob("[0-9]*.md")), ids=lambda path: path.stem)
def test_a_finding_is_found_again_by_its_line(text):
    assert text.with_suffix(".py").exists()
    for engine, line in LINE.findall(text.read_text()):
        verdict = check(with_known(engine), replay=line)
        assert verdict.kind in ("differs", "raised") and verdict.bad, f"{verdict.kind}: {verdict.message}"
