"""The pytest plugin: options of `shardproof.verify` and `shardproof.check`, and the reports of a run."""

import contextlib

import pytest


def pytest_addoption(parser):
    """Options that say what is drawn."""
    group = parser.getgroup("shardproof")
    group.addoption("--shardproof-cases", type=int, default=None, metavar="N", help="cases that are drawn")
    group.addoption("--shardproof-minutes", type=float, default=None, metavar="M", help="draw cases for so long instead")
    group.addoption("--shardproof-seed", type=int, default=None, metavar="N", help="the seed of the draws (0)")
    group.addoption("--shardproof-case", default=None, metavar="LINE", help="run this one case, which a report printed")


def pytest_configure(config):
    """Hands them over."""
    chosen = {name: config.getoption(f"--shardproof-{name}") for name in ("cases", "minutes", "seed", "case")}
    if any(value is not None for value in chosen.values()):
        with contextlib.suppress(ImportError):  # shardproof.check may be there without the library
            from shardproof.check import verify

            verify.defaults.update({name: value for name, value in chosen.items() if value is not None})


@pytest.fixture
def proves(record_property):
    """``proves(make_model, make_batch, loss)``: `shardproof.verify`, its report among the properties of the test."""
    import shardproof

    def run(*args, **kwargs):
        report = shardproof.verify(*args, **kwargs)
        record_property("shardproof", str(report))
        return report

    return run


@pytest.fixture
def checks(request, record_property):
    """``checks(parallelize, make_model, make_batch, loss)``: `shardproof.check`, whose report has to hold.

    ``--shardproof-case LINE`` runs that case alone.
    """
    from shardproof.check import check

    taken = {"cases": "cases", "minutes": "budget", "seed": "seed", "case": "replay"}
    options = {name: request.config.getoption(f"--shardproof-{option}") for option, name in taken.items()}
    if options["budget"] is not None:
        options["budget"] *= 60
    given = {name: value for name, value in options.items() if value is not None}

    def run(*args, **kwargs):
        report = check(*args, **{**kwargs, **given})
        record_property("shardproof", str(report))
        assert not report.bad if "replay" in given else report.ok, str(report)
        return report

    return run
