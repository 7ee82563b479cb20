"""A test case with a folder of its own, gone after each test."""
import os
import tempfile
import unittest


class ScratchCase(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = folder.name

    def path(self, name):
        return os.path.join(self.root, name)
