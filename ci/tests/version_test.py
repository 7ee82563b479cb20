"""One version: what the headers say is what the package, the command, the Python module and the changes say."""
import os
import re
import subprocess
import unittest

from scratch import CI

ROOT = os.path.dirname(CI)
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
        self.assertRegex(done.stdout, rf"\Ashardproof {re.escape(self.version)}, LibTorch 2\.11\.\d+\n\Z")

    def test_the_python_module_has_it(self):
        self.assertEqual(found(r'^__version__ = "(.*)"$', ROOT, "python/shardproof/__init__.py"), self.version)

    def test_the_newest_changes_are_those_of_this_version(self):
        self.assertEqual(found(r"^## (\S+)", ROOT, "CHANGELOG.md"), self.version)


if __name__ == "__main__":
    unittest.main()
