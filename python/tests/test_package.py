"""The package: names, stubs, documentation, the command."""

import ast
import importlib
import inspect
import os
import subprocess
import sys

import pytest
import torch  # noqa: F401

import shardproof

ROOT = os.path.dirname(os.path.abspath(shardproof.__file__))
PARTS = [
    "checkpoint",
    "ema",
    "fsdp",
    "lora",
    "optim",
    "parallel",
    "ranks",
    "sharded",
    "sharding",
    "torch_state",
    "units",
    "check.verify",
]


def stub(name):
    with open(os.path.join(ROOT, name), encoding="utf-8") as file:
        return ast.parse(file.read())


def test_the_stub_of_the_extension_module_has_its_names():
    from shardproof import _C

    def public(names):
        return {name for name in names if not name.startswith(("__", "_pybind11"))}

    tree = stub("_C.pyi")
    declared = {node.name: node for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    assert set(declared) == public(dir(_C))
    for name, node in declared.items():
        if isinstance(node, ast.ClassDef) and not issubclass(getattr(_C, name), BaseException):
            inside = public(each.name for each in node.body if isinstance(each, ast.FunctionDef))
            assert inside == public(vars(getattr(_C, name))), name


def test_the_stub_of_the_package_has_its_names_and_all_of_them_are_there():
    tree = stub("__init__.pyi")
    declared = {alias.asname for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert declared == set(shardproof.__all__)
    for name in shardproof.__all__:
        assert getattr(shardproof, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        shardproof.nothing


def test_everything_public_is_documented():
    for part in PARTS:
        module = importlib.import_module("shardproof." + part)
        for name, value in vars(module).items():
            if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
                continue
            assert inspect.getdoc(value), f"{part}.{name} has no docstring"
            parameters = inspect.signature(value).parameters if inspect.isfunction(value) else {}
            if len(parameters) > 2 and name in shardproof.__all__:
                for parameter in parameters:
                    assert parameter in inspect.getdoc(value), f"the docstring of {name} does not name {parameter}"


def test_the_command_is_there():
    done = subprocess.run([sys.executable, "-m", "shardproof", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "verify" in done.stdout, done.stdout + done.stderr


def test_a_torch_that_it_was_not_built_for_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    with pytest.raises(ImportError, match=r"built for torch 2\.1\d, and torch 2\.9\.1 is installed\. Install the package"):
        shardproof._open_library()


def test_importing_the_package_opens_no_library():
    code = (
        "import sys, shardproof; assert 'torch' not in sys.modules and shardproof.__version__; shardproof.Error; import torch"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
