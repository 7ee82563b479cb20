"""The blocks of code in documents that take minutes; see docs_test.py."""
import unittest

from docs_test import expect_blocks_run


class DocsNightly(unittest.TestCase):
    def test_every_block_that_is_marked_nightly_runs(self):
        expect_blocks_run(self, "nightly")


if __name__ == "__main__":
    unittest.main()
