"""What the documents show is executed: each block marked `run`. Those that are marked `nightly` have docs_nightly_test.py.

The blocks of one page run in their order and in one folder, which has links to what the tree has. So what they write does not
lie in the tree, and a block may use what an earlier one of its page has written. Blocks of Python are forked from a process
that has imported what all of them import, which takes longer than what they do.
"""
import importlib
import os
import subprocess
import sys
import tempfile
import traceback
import unittest

from scratch import CI

sys.path.insert(0, CI)
# pylint: disable=wrong-import-position
from pages import blocks, reference  # noqa: E402

ROOT = os.path.dirname(CI)
BUILD = os.environ["SHARDPROOF_BUILD"]


def documents():
    for path in ("README.md", "CONTRIBUTING.md"):
        yield path
    for folder, _, names in sorted(os.walk(os.path.join(ROOT, "docs"))):
        yield from (os.path.relpath(os.path.join(folder, name), ROOT) for name in sorted(names) if name.endswith(".md"))


def blocks_of(path, kind):
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        return [block for block in blocks.blocks_of(file.read())[0] if block.kind == kind]


def linked_tree(folder):
    """Makes the folder look like the root of the tree, with this build as `build`."""
    for name in os.listdir(ROOT):
        if name != "build" and not (name.startswith(".") and name != ".venv"):
            os.symlink(os.path.join(ROOT, name), os.path.join(folder, name))
    os.symlink(BUILD, os.path.join(folder, "build"))


ENVIRONMENT = dict(os.environ, PYTHONPATH=os.path.join(BUILD, "python"), PYTHONDONTWRITEBYTECODE="1",
                   OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")


def run_python(text, folder, out):
    """In the forked process, as `python -c` does it."""
    os.chdir(folder)
    for fd in (1, 2):
        os.dup2(out.fileno(), fd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = ["-c"]
    sys.path[0] = ""
    main = type(sys)("__main__")
    sys.modules["__main__"] = main
    code = 0
    try:
        exec(compile(text, "<string>", "exec"), main.__dict__)  # pylint: disable=exec-used
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # pylint: disable=broad-except
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # pylint: disable=protected-access


def forked(text, folder):
    os.environ.update(ENVIRONMENT)
    if os.path.join(BUILD, "python") not in sys.path:
        sys.path.insert(1, os.path.join(BUILD, "python"))
    for module in ("shardproof.fsdp", "torch.distributed.checkpoint", "torch.distributed.tensor.parallel", "torch._dynamo"):
        importlib.import_module(module)
    with tempfile.TemporaryFile("w+") as out:
        child = os.fork()
        if not child:
            run_python(text, folder, out)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        return subprocess.CompletedProcess(["python"], code, out.read())


def executed(block, folder):
    """What a block prints, and how it ends."""
    if block.language == "python":
        return forked(block.text, folder)
    return subprocess.run(["bash", "-euo", "pipefail", "-c", block.text], cwd=folder, env=ENVIRONMENT,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)


def expect_blocks_run(test, kind):
    ran = 0
    for path in documents():
        found = blocks_of(path, kind)
        with tempfile.TemporaryDirectory() as folder:
            if found:
                linked_tree(folder)
            for block in found:
                with test.subTest(f"{path}:{block.line}"):
                    done = executed(block, folder)
                    test.assertEqual(done.returncode, 0, f"{path}:{block.line}:\n{block.text}\n{done.stdout}")
                    ran += 1
    test.assertGreater(ran, 0, f"no document has a block of the kind {kind}")


class Docs(unittest.TestCase):
    def test_every_block_that_is_marked_run_runs(self):
        expect_blocks_run(self, "run")

    def test_the_site_has_no_link_that_leads_nowhere(self):
        if not os.path.exists(os.path.join(ROOT, "build-docs", ".ready")):
            self.skipTest("the site's generator is not installed; ci/docs installs it and builds the site")
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([os.path.join(CI, "docs"), "--out", folder], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                  text=True, check=False)
            self.assertEqual(done.returncode, 0, done.stdout)
            self.assertTrue(os.path.exists(os.path.join(folder, "reference", "algebra.html")), done.stdout)

    def test_every_public_header_has_a_chapter_and_every_declaration_a_section(self):
        text = "\n".join(reference.pages(ROOT, []).values())
        for headers in reference.headers_of(ROOT).values():
            for header in headers:
                self.assertIn(f"\n## {header}\n", text)
        for name in ("Layout", "fully_shard", "Sharded", "Comm", "run_threads", "SHARDPROOF_VERSION", "SHARD_REQUIRE"):
            self.assertRegex(text, rf"(?m)^### (.*, )?{name}(,|$)")

    def test_comments_become_text_and_drawings_stay(self):
        top, sections = reference.sections_of(
            "// Cuts a_tensor.\n//\n//   0 1 | 2 3\n#pragma once\n\n#include <a.h>\n\n"
            "namespace shardproof {\n\nclass Later;\n\n"
            "// The *first*.\nstruct First {\n  int x;  // a {brace\n};\n\n// Both.\nint one(int x);\nint two();\n\n"
            "}  // namespace shardproof\n")
        self.assertEqual(reference.markdown_of(top), "Cuts a_tensor.\n\n\n```text\n  0 1 | 2 3\n```")
        self.assertEqual([(comment, reference.names_of(code)) for _, comment, code in sections],
                         [([], []), (["The *first*."], ["First"]), (["Both."], ["one", "two"])])
        self.assertEqual(reference.markdown_of(["The *first*."]), "The \\*first\\*.")


if __name__ == "__main__":
    unittest.main()
