"""The pytest plugin: options of `shardproof.verify`, and the reports of a run."""

import pytest


def pytest_addoption(parser):
    """Options that say what `shardproof.verify` draws."""
    group = parser.getgroup("shardproof")
    group.addoption("--shardproof-cases", type=int, default=None, metavar="N", help="cases that shardproof.verify draws (50)")
    group.addoption("--shardproof-minutes", type=float, default=None, metavar="M", help="draw cases for so long instead")
    group.addoption("--shardproof-seed", type=int, default=None, metavar="N", help="the seed of the draws (0)")
    group.addoption("--shardproof-case", default=None, metavar="LINE", help="run this one case, which a report printed")


def pytest_configure(config):
    """Hands them over."""
    chosen = {name: config.getoption(f"--shardproof-{name}") for name in ("cases", "minutes", "seed", "case")}
    if any(value is not None for value in chosen.values()):
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
