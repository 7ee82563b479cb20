"""One version: what the headers say is what the package, the command, the Python module and the changes say."""
import os
import re
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

from scratch import CI, write

ROOT = os.path.dirname(CI)
sys.path.insert(0, os.path.join(ROOT, "python"))
import torch_dependency  # noqa: E402  pylint: disable=wrong-import-position

BUILD = os.environ["SHARDPROOF_BUILD"]


def found(pattern, *path):
    with open(os.path.join(*path), encoding="utf-8") as file:
        return re.search(pattern, file.read(), re.MULTILINE).group(1)


class Version(unittest.TestCase):
    def setUp(self):
        self.version = found(r'^#define SHARDPROOF_VERSION "(\d+\.\d+\.\d+)"$', ROOT, "impl/include/shardproof/version.h")

    def test_the_number_is_that_of_the_text(self):
        major, minor, patch = map(int, self.version.split("."))
        number = found(r"^#define SHARDPROOF_VERSION_NUMBER (\d+)$", ROOT, "impl/include/shardproof/version.h")
        self.assertEqual(int(number), 10000 * major + 100 * minor + patch)

    def test_the_installed_package_has_it(self):
        self.assertEqual(found(r'^set\(PACKAGE_VERSION "([^"]*)"\)', BUILD, "shardproofConfigVersion.cmake"), self.version)

    def test_the_command_prints_that_of_the_library(self):
        done = subprocess.run([os.path.join(BUILD, "shardproof"), "--version"], capture_output=True, text=True, check=True)
        torch = found(r'^TORCH = "(.*)"$', BUILD, "python/shardproof/_built_for.py")
        self.assertRegex(done.stdout, rf"\Ashardproof {re.escape(self.version)}, LibTorch {re.escape(torch)}\.\d+\n\Z")

    def test_the_python_package_depends_on_the_torch_that_it_is_built_against_and_refuses_others(self):
        with tempfile.TemporaryDirectory() as prefix, mock.patch.object(sys, "prefix", prefix):
            with self.assertRaisesRegex(RuntimeError, f"{prefix} has none. Install one of them first"):
                torch_dependency.dynamic_metadata("dependencies")
            file = os.path.join(prefix, "lib/python3.12/site-packages/torch/version.py")
            write(file, "__version__ = '2.15.0+cpu'\n")
            self.assertEqual(torch_dependency.dynamic_metadata("dependencies"), ["torch==2.15.*"])
            self.assertEqual(torch_dependency.dynamic_metadata("version"), f"{self.version}+torch2.15")
            write(file, "__version__ = '2.1.2'\n")
            with self.assertRaisesRegex(RuntimeError, f"has to be one of 2.11, .*{prefix} has 2.1.2"):
                torch_dependency.dynamic_metadata("dependencies")

    def test_the_python_module_has_it(self):
        self.assertEqual(found(r'^__version__ = "(.*)"$', ROOT, "python/shardproof/__init__.py"), self.version)

    def test_the_newest_changes_are_those_of_this_version(self):
        self.assertEqual(found(r"^## (\S+)", ROOT, "CHANGELOG.md"), self.version)


if __name__ == "__main__":
    unittest.main()
