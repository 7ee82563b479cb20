"""ci/check_layers finds each kind of violation when one is planted in a tree that has none."""
import importlib.machinery
import importlib.util
import os
import tempfile
import unittest

CI = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def load(name):
    loader = importlib.machinery.SourceFileLoader(name, os.path.join(CI, name))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    loader.exec_module(module)
    return module


check_layers = load("check_layers")

EXAMPLE = '#include "shardproof/shardproof.h"\nint main() { return 0; }\n'
CLEAN = {
    ".clang-format": "ColumnLimit: 110\n",
    "README.md": "# A tree\n```cpp\n" + EXAMPLE + "```\n",
    "impl/CMakeLists.txt": "add_library(shardproof SHARED src/mesh.cpp src/plan.cpp)\n",
    "impl/include/shardproof/mesh.h": "#pragma once\n#include <vector>\n",
    "impl/include/shardproof/plan.h": '#include "shardproof/mesh.h"\n',
    "impl/include/shardproof/shardproof.h": '#include "shardproof/plan.h"\n',
    "impl/src/mesh.cpp": '#include "shardproof/mesh.h"\n',
    "impl/src/plan.cpp": '#include "shardproof/plan.h"\n#include "lower.h"\n',
    "impl/src/lower.h": '#include "shardproof/mesh.h"\n',
    "golden/CMakeLists.txt": "add_library(golden golden.cpp)\n",
    "golden/golden.h": "#include <ATen/core/Tensor.h>\n",
    "golden/golden.cpp": '#include "golden.h"\n',
    "harness/CMakeLists.txt": "add_library(harness case.cpp)\n",
    "harness/case.h": '#include "shardproof/mesh.h"\n#include "golden/golden.h"\n',
    "harness/case.cpp": '#include "case.h"\n',
    "examples/CMakeLists.txt": "add_executable(tiny tiny.cpp)\n",
    "examples/tiny.cpp": EXAMPLE,
}


class CheckLayers(unittest.TestCase):
    def found(self, changes):
        """Messages about the clean tree with these files added, replaced or (None) removed."""
        with tempfile.TemporaryDirectory() as root:
            for path, text in {**CLEAN, **changes}.items():
                if text is not None:
                    os.makedirs(os.path.dirname(os.path.join(root, path)), exist_ok=True)
                    with open(os.path.join(root, path), "w", encoding="utf-8") as file:
                        file.write(text)
            return check_layers.violations(root)[0]

    def expect(self, changes, path, words):
        found = self.found(changes)
        self.assertEqual([violation[0] for violation in found], [path], found)
        self.assertIn(words, found[0][2])

    def test_a_clean_tree_has_no_violation(self):
        self.assertEqual(self.found({}), [])

    def test_a_lower_layer_must_not_include_a_higher_one(self):
        self.expect({"impl/src/mesh.cpp": '#include "shardproof/plan.h"\n'}, "impl/src/mesh.cpp",
                    "layer mesh must not include impl/include/shardproof/plan.h of layer plan")

    def test_a_public_header_must_not_include_a_private_one(self):
        header = '#include "shardproof/mesh.h"\n#include "lower.h"\n'
        self.expect({"impl/include/shardproof/plan.h": header},
                    "impl/include/shardproof/plan.h", "must not include the private impl/src/lower.h")

    def test_golden_must_not_see_the_library(self):
        self.expect({"golden/golden.cpp": '#include "golden.h"\n#include "shardproof/mesh.h"\n'},
                    "golden/golden.cpp", "golden must not see impl/include/shardproof/mesh.h")

    def test_the_library_must_not_see_golden_even_with_angle_brackets(self):
        self.expect({"impl/src/plan.cpp": '#include "lower.h"\n#include <golden/golden.h>\n'},
                    "impl/src/plan.cpp", "impl must not see golden/golden.h")

    def test_the_harness_must_not_see_private_headers(self):
        self.expect({"harness/case.cpp": '#include "case.h"\n#include "lower.h"\n'}, "harness/case.cpp",
                    "harness must not see impl/src/lower.h")

    def test_an_example_must_not_see_golden(self):
        example = '#include "golden/golden.h"\n'
        self.expect({"examples/tiny.cpp": example, "README.md": "```cpp\n" + example + "```\n"},
                    "examples/tiny.cpp", "examples must not see golden/golden.h")

    def test_the_algebra_must_not_see_torch(self):
        self.expect({"impl/src/mesh.cpp": '#include "shardproof/mesh.h"\n#include <ATen/ATen.h>\n'},
                    "impl/src/mesh.cpp", "layer mesh is free of Torch")

    def test_a_quoted_include_must_exist(self):
        self.expect({"harness/case.cpp": '#include "case.h"\n#include "gone.h"\n'}, "harness/case.cpp",
                    "no file")

    def test_a_file_of_the_library_must_belong_to_a_layer(self):
        self.expect({"impl/src/zebra.cpp": "\n",
                     "impl/CMakeLists.txt": "src/mesh.cpp src/plan.cpp src/zebra.cpp\n"},
                    "impl/src/zebra.cpp", "belongs to no layer")

    def test_a_source_that_no_list_names_is_dead(self):
        self.expect({"harness/old.cpp": "\n"}, "harness/old.cpp", "no CMake list names it")

    def test_a_source_named_only_in_a_comment_is_dead(self):
        self.expect({"harness/CMakeLists.txt": "add_library(harness)  # case.cpp\n"}, "harness/case.cpp",
                    "no CMake list names it")

    def test_a_header_that_nobody_includes_is_dead(self):
        self.expect({"harness/old.h": "\n"}, "harness/old.h", "nobody includes it")

    def test_leftovers_are_found(self):
        for word in ("TO" + "DO", "FIX" + "ME", "XX" + "X"):
            self.expect({"harness/CMakeLists.txt": f"case.cpp  # {word}: later\n"},
                        "harness/CMakeLists.txt", "leftover " + word)

    def test_paths_of_one_machine_are_found(self):
        self.expect({"harness/CMakeLists.txt": "case.cpp /ho" + "me/someone/torch\n"},
                    "harness/CMakeLists.txt", "path of one machine")

    def test_long_lines_are_found(self):
        self.expect({"golden/golden.h": "#include <ATen/core/Tensor.h>\n//" + 109 * "-" + "\n"},
                    "golden/golden.h", "111 columns")
        self.assertEqual(self.found({"golden/golden.h": "//" + 108 * "-" + "\n"}), [])

    def test_long_files_are_found(self):
        self.expect({"golden/golden.cpp": '#include "golden.h"\n' + 500 * "\n"}, "golden/golden.cpp",
                    "501 lines")

    def test_a_readme_block_must_equal_an_example(self):
        self.expect({"README.md": "text\n```cpp\nint main() {}\n```\n"}, "README.md",
                    "not equal to a file of examples/")

    def test_a_readme_must_show_an_example(self):
        self.expect({"README.md": "nothing\n"}, "README.md", "shows no C++ example")


if __name__ == "__main__":
    unittest.main()
