"""What tests of scripts share: folders that are gone after each test, trees of small files, and scripts loaded as modules."""
import importlib.machinery
import importlib.util
import os
import tempfile
import unittest

CI = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class ScratchCase(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = folder.name

    def path(self, name):
        return os.path.join(self.root, name)


def write(path, text, mode=0o644):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(path, mode)
    return path


def load(name):
    """The script ci/NAME as a module."""
    loader = importlib.machinery.SourceFileLoader(name, os.path.join(CI, name))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    loader.exec_module(module)
    return module


def judged(judge, files):
    """What judge(root) says of a tree of these files, {path: text}; a text that is None leaves the file out."""
    with tempfile.TemporaryDirectory() as root:
        for path, text in files.items():
            if text is not None:
                write(os.path.join(root, path), text)
        return judge(root)
