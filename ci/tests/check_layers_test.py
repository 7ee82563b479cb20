"""ci/check_layers finds each kind of violation when one is planted in a tree that has none."""
import os
import unittest

from scratch import judged, load

check_layers = load("check_layers")

EXAMPLE = '#include "shardproof/shardproof.h"\nint main() { return 0; }\n'
CLEAN = {
    ".clang-format": "ColumnLimit: 110\n",
    "README.md": "# A tree\n```cpp\n" + EXAMPLE + "```\n",
    "impl/CMakeLists.txt": "add_library(shardproof SHARED)\n"
                           "shardproof_room(shardproof algebra mesh.cpp\n  plan.cpp)\n"
                           "shardproof_room(shardproof comm comm.cpp)\n",
    "impl/include/shardproof/algebra/mesh.h": "#pragma once\n#include <vector>\n",
    "impl/include/shardproof/algebra/plan.h": '#include "shardproof/algebra/mesh.h"\n',
    "impl/include/shardproof/comm/comm.h": "#include <ATen/core/Tensor.h>\n",
    "impl/include/shardproof/shardproof.h": '#include "shardproof/algebra/plan.h"\n#include "shardproof/comm/comm.h"\n',
    "impl/src/algebra/mesh.cpp": '#include "shardproof/algebra/mesh.h"\n',
    "impl/src/algebra/plan.cpp": '#include "shardproof/algebra/plan.h"\n#include "algebra/lower.h"\n',
    "impl/src/algebra/lower.h": '#include "shardproof/algebra/mesh.h"\n',
    "impl/src/comm/comm.cpp": '#include "shardproof/comm/comm.h"\n#include "internal/comm/label.h"\n',
    "impl/internal/comm/label.h": '#include "shardproof/comm/comm.h"\n',
    "golden/CMakeLists.txt": "add_library(golden)\nshardproof_room(golden . UNDER . golden.cpp)\n",
    "golden/golden.h": "#include <ATen/core/Tensor.h>\n",
    "golden/golden.cpp": '#include "golden.h"\n',
    "harness/CMakeLists.txt": "add_library(harness)\nshardproof_room(harness case UNDER . case.cpp)\n",
    "harness/case/case.h": '#include "shardproof/algebra/mesh.h"\n#include "golden/golden.h"\n',
    "harness/case/case.cpp": '#include "harness/case/case.h"\n',
    "properties/CMakeLists.txt": "shardproof_test(NAME comm_props SOURCES comm/comm_props.cpp)\n",
    "properties/comm/comm_props.cpp": '#include "properties/kit/models.h"\n#include "internal/comm/label.h"\n',
    "properties/kit/models.h": '#include "harness/case/case.h"\n',
    "examples/CMakeLists.txt": "add_executable(tiny tiny.cpp)\n",
    "examples/tiny.cpp": EXAMPLE,
}
NONE = check_layers.Exceptions(private={}, loops=[])
# Two more private headers in comm, of which the first has a source.
FILES = {
    "impl/CMakeLists.txt": CLEAN["impl/CMakeLists.txt"] + "shardproof_room(shardproof comm group.cpp)\n",
    "impl/src/comm/comm.cpp": CLEAN["impl/src/comm/comm.cpp"] + '#include "comm/group.h"\n',
    "impl/src/comm/group.h": '#include "comm/member.h"\n',
    "impl/src/comm/group.cpp": '#include "comm/group.h"\n',
    "impl/src/comm/member.h": "\n",
}


class CheckLayers(unittest.TestCase):
    def found(self, changes, exceptions=NONE):
        """Messages about the clean tree with these files added, replaced or (None) removed."""
        return judged(lambda root: check_layers.violations(root, exceptions)[0], {**CLEAN, **changes})

    def expect(self, changes, path, words, exceptions=NONE):
        found = self.found(changes, exceptions)
        self.assertEqual([violation[0] for violation in found], [path], found)
        self.assertIn(words, found[0][2])

    def test_a_clean_tree_has_no_violation(self):
        self.assertEqual(self.found({}), [])

    def test_a_room_must_not_include_one_above_it(self):
        comm = '#include "shardproof/comm/comm.h"\n#include "internal/comm/label.h"\n'
        self.expect({"impl/src/comm/comm.cpp": comm + '#include "shardproof/sharding/bucket.h"\n',
                     "impl/include/shardproof/sharding/bucket.h": "\n"}, "impl/src/comm/comm.cpp",
                    "room comm must not include impl/include/shardproof/sharding/bucket.h of room sharding")

    def test_the_rooms_of_the_harness_have_an_order_too(self):
        self.expect({"harness/case/case.cpp": '#include "harness/case/case.h"\n#include "harness/run/run.h"\n',
                     "harness/run/run.h": "\n"}, "harness/case/case.cpp",
                    "room case must not include harness/run/run.h of room run")

    def test_a_public_header_must_not_include_a_private_one(self):
        header = '#include "shardproof/algebra/mesh.h"\n#include "algebra/lower.h"\n'
        self.expect({"impl/include/shardproof/algebra/plan.h": header},
                    "impl/include/shardproof/algebra/plan.h", "must not include the private impl/src/algebra/lower.h")

    def test_a_public_header_must_not_include_one_for_tests(self):
        header = '#include <ATen/core/Tensor.h>\n#include "internal/comm/tag.h"\n'
        self.expect({"impl/include/shardproof/comm/comm.h": header, "impl/internal/comm/tag.h": "\n"},
                    "impl/include/shardproof/comm/comm.h", "must not include the private impl/internal/comm/tag.h")

    def test_a_header_for_tests_must_not_include_a_private_one(self):
        self.expect({"impl/internal/comm/label.h": '#include "comm/group.h"\n', "impl/src/comm/group.h": "\n"},
                    "impl/internal/comm/label.h", "must not include the private impl/src/comm/group.h")

    def test_the_harness_must_not_see_headers_for_tests(self):
        self.expect({"harness/case/case.cpp": '#include "harness/case/case.h"\n#include "impl/internal/comm/label.h"\n'},
                    "harness/case/case.cpp", "harness must not see impl/internal/comm/label.h")

    def test_the_tests_must_not_see_private_headers(self):
        test = CLEAN["properties/comm/comm_props.cpp"] + '#include "impl/src/algebra/lower.h"\n'
        self.expect({"properties/comm/comm_props.cpp": test}, "properties/comm/comm_props.cpp",
                    "properties must not see impl/src/algebra/lower.h")

    def test_a_private_header_is_for_its_wing(self):
        comm = '#include "shardproof/comm/comm.h"\n#include "internal/comm/label.h"\n#include "algebra/lower.h"\n'
        self.expect({"impl/src/comm/comm.cpp": comm}, "impl/src/comm/comm.cpp",
                    "algebra/lower.h is private to its wing; room comm must not include it")
        allowed = check_layers.Exceptions(private={"algebra/lower.h": {"comm"}}, loops=[])
        self.assertEqual(self.found({"impl/src/comm/comm.cpp": comm}, allowed), [])

    def test_rooms_of_one_wing_share_private_headers(self):
        self.assertEqual(self.found({
            "impl/CMakeLists.txt": CLEAN["impl/CMakeLists.txt"] + "shardproof_room(shardproof comm/mpi mpi.cpp)\n",
            "impl/src/comm/mpi/mpi.cpp": '#include "comm/process/watch.h"\n', "impl/src/comm/process/watch.h": "\n"}), [])

    def test_an_exception_that_is_not_needed_is_a_violation(self):
        allowed = check_layers.Exceptions(private={"algebra/lower.h": {"comm"}}, loops=[])
        self.expect({}, "ci/check_layers", "comm does not include algebra/lower.h", allowed)
        allowed = check_layers.Exceptions(private={}, loops=[{"comm/comm", "comm/group"}])
        self.expect({}, "ci/check_layers", "no such loop (any more)", allowed)

    def test_files_of_a_room_that_need_each_other_are_found(self):
        self.assertEqual(self.found(FILES), [])
        loop = {**FILES, "impl/src/comm/group.h": '#include "shardproof/comm/comm.h"\n#include "comm/member.h"\n'}
        self.expect(loop, "impl/include/shardproof/comm/comm.h", "in a loop of files inside its room: comm/comm, comm/group")
        allowed = check_layers.Exceptions(private={}, loops=[{"comm/comm", "comm/group"}])
        self.assertEqual(self.found(loop, allowed), [])

    def test_a_loop_through_a_header_without_a_source_is_found(self):
        self.expect({**FILES, "impl/src/comm/member.h": '#include "shardproof/comm/comm.h"\n'},
                    "impl/include/shardproof/comm/comm.h", "in a loop of files inside its room: comm/comm, comm/group")

    def test_headers_that_include_each_other_are_found(self):
        self.expect({**FILES, "impl/src/comm/member.h": '#include "comm/group.h"\n'}, "impl/src/comm/group.h",
                    "in a loop of files inside its room: impl/src/comm/group.h, impl/src/comm/member.h")

    def test_a_loop_in_the_harness_is_found(self):
        self.expect({"harness/CMakeLists.txt": CLEAN["harness/CMakeLists.txt"].replace("case.cpp", "case.cpp draw.cpp"),
                     "harness/case/case.cpp": '#include "harness/case/case.h"\n#include "harness/case/draw.h"\n',
                     "harness/case/draw.h": '#include "harness/case/case.h"\n',
                     "harness/case/draw.cpp": '#include "harness/case/draw.h"\n'}, "harness/case/case.cpp",
                    "case/case, case/draw")

    def test_golden_must_not_see_the_library(self):
        self.expect({"golden/golden.cpp": '#include "golden.h"\n#include "shardproof/algebra/mesh.h"\n'},
                    "golden/golden.cpp", "golden must not see impl/include/shardproof/algebra/mesh.h")

    def test_the_library_must_not_see_golden_even_with_angle_brackets(self):
        plan = CLEAN["impl/src/algebra/plan.cpp"] + "#include <golden/golden.h>\n"
        self.expect({"impl/src/algebra/plan.cpp": plan}, "impl/src/algebra/plan.cpp", "impl must not see golden/golden.h")

    def test_the_harness_must_not_see_private_headers(self):
        self.expect({"harness/case/case.cpp": '#include "harness/case/case.h"\n#include "impl/src/algebra/lower.h"\n'},
                    "harness/case/case.cpp", "harness must not see impl/src/algebra/lower.h")

    def test_an_example_must_not_see_golden(self):
        example = '#include "golden/golden.h"\n'
        self.expect({"examples/tiny.cpp": example, "README.md": "```cpp\n" + example + "```\n"},
                    "examples/tiny.cpp", "examples must not see golden/golden.h")

    def test_the_algebra_must_not_see_torch(self):
        self.expect({"impl/src/algebra/mesh.cpp": '#include "shardproof/algebra/mesh.h"\n#include <ATen/ATen.h>\n'},
                    "impl/src/algebra/mesh.cpp", "room algebra is free of Torch")

    def test_formats_must_not_see_torch_through_another_room(self):
        self.expect({"impl/include/shardproof/checkpoint/format/zip.h": '#include "shardproof/comm/comm.h"\n',
                     "impl/include/shardproof/shardproof.h": CLEAN["impl/include/shardproof/shardproof.h"]
                                                             + '#include "shardproof/checkpoint/format/zip.h"\n'},
                    "impl/include/shardproof/checkpoint/format/zip.h", "room checkpoint/format is free of Torch")

    def test_base_knows_the_dtypes_of_torch_and_no_more(self):
        def base(include):
            return {"impl/include/shardproof/base/dtypes.h": f"#include <{include}>\n",
                    "impl/src/comm/comm.cpp": CLEAN["impl/src/comm/comm.cpp"] + '#include "shardproof/base/dtypes.h"\n'}
        self.assertEqual(self.found(base("c10/core/ScalarType.h")), [])
        self.expect(base("c10/core/Device.h"), "impl/include/shardproof/base/dtypes.h", "room base is free of Torch")

    def test_a_quoted_include_must_exist(self):
        self.expect({"harness/case/case.cpp": '#include "harness/case/case.h"\n#include "gone.h"\n'},
                    "harness/case/case.cpp", "no file")

    def test_a_private_header_is_included_by_its_room(self):
        for include in ("lower.h", "../algebra/lower.h"):
            plan = f'#include "shardproof/algebra/plan.h"\n#include "{include}"\n#include "algebra/lower.h"\n'
            self.expect({"impl/src/algebra/plan.cpp": plan}, "impl/src/algebra/plan.cpp",
                        f'"{include}" means impl/src/algebra/lower.h; begin in impl/include, impl/src, impl')

    def test_a_file_must_lie_in_a_room(self):
        self.expect({"impl/src/zebra.cpp": "\n",
                     "impl/CMakeLists.txt": CLEAN["impl/CMakeLists.txt"] + "shardproof_room(shardproof . zebra.cpp)\n"},
                    "impl/src/zebra.cpp", "lies in no room")
        for folder in ("harness", "properties", "properties/zoo"):
            area = folder.split("/", maxsplit=1)[0]
            lists = CLEAN[f"{area}/CMakeLists.txt"] + f"{os.path.relpath(folder, area)}/zebra.cpp\n"
            self.expect({f"{folder}/zebra.cpp": "\n", f"{area}/CMakeLists.txt": lists}, f"{folder}/zebra.cpp",
                        "lies in no room")

    def test_a_source_that_no_list_names_is_dead(self):
        self.expect({"harness/case/old.cpp": "\n"}, "harness/case/old.cpp", "no CMake list names it")

    def test_a_source_that_is_listed_for_another_room_is_dead(self):
        lists = CLEAN["harness/CMakeLists.txt"].replace("harness case", "harness run")
        self.expect({"harness/CMakeLists.txt": lists}, "harness/case/case.cpp", "no CMake list names it")

    def test_a_source_named_only_in_a_comment_is_dead(self):
        lists = "add_library(harness)  # shardproof_room(harness case UNDER . case.cpp)\n"
        self.expect({"harness/CMakeLists.txt": lists}, "harness/case/case.cpp", "no CMake list names it")

    def test_a_header_that_nobody_includes_is_dead(self):
        self.expect({"harness/case/old.h": "\n"}, "harness/case/old.h", "nobody includes it")

    def test_leftovers_are_found(self):
        for word in ("TO" + "DO", "FIX" + "ME", "XX" + "X"):
            self.expect({"harness/CMakeLists.txt": CLEAN["harness/CMakeLists.txt"] + f"# {word}: later\n"},
                        "harness/CMakeLists.txt", "leftover " + word)

    def test_paths_of_one_machine_are_found(self):
        self.expect({"harness/CMakeLists.txt": CLEAN["harness/CMakeLists.txt"] + "set(torch /ho" + "me/someone/torch)\n"},
                    "harness/CMakeLists.txt", "path of one machine")

    def test_mesh_axes_by_their_names_are_found(self):
        code = '#include "harness/case/case.h"\nint ranks(const Mesh& mesh) { return mesh.size("tp"); }\n'
        self.expect({"harness/case/case.cpp": code}, "harness/case/case.cpp", "a mesh axis by its name")
        self.assertEqual(self.found({"harness/case/case.cpp": code.replace("mesh.size(", "Draws(seed, ")}), [])
        plan = CLEAN["impl/include/shardproof/algebra/plan.h"] + 'inline const char* tensor = "tp";\n'
        self.expect({"impl/include/shardproof/algebra/plan.h": plan}, "impl/include/shardproof/algebra/plan.h", "a mesh axis")

    def test_bools_and_mutable_members_beside_states_are_found(self):
        path, room = "impl/src/sharding/unit.h", "shardproof_room(shardproof sharding unit.cpp)\n"
        files = {"impl/CMakeLists.txt": CLEAN["impl/CMakeLists.txt"] + room,
                 "impl/src/sharding/unit.cpp": '#include "sharding/unit.h"\n'}
        self.assertEqual(self.found({**files, path: "  bool is_left() const;\n  bool recompute = false;\n"}), [])
        for member in ("bool is_left_ = false;", "const bool first_, last_;", "mutable Work work_;"):
            self.expect({**files, path: f"  {member}\n"}, path, "a bool or mutable member")

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
