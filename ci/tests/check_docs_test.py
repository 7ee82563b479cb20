"""ci/check_docs finds each kind of name that does not exist when one is planted in documents that have none."""
import unittest

from scratch import judged, load

check_docs = load("check_docs")

CLEAN = {
    "README.md": "Read [the algebra](docs/layout.md#the-words), then run `build/tiny` of `examples/tiny.cpp`.\n"
                 "\n```cpp from=examples/tiny.cpp\nint main() {}\n```\n\n```sh run\nbuild/tiny\n```\n\n```text\n1 2 3\n```\n",
    "docs/layout.md": "# The words\n\n`algebra/mesh.h` says it. [Back](../README.md).\n"
                      "Layout.one_copy_tiles_the_tensor, Layout.one_copy_*,\n"
                      "Gpu.a_case_of_mlp_holds, Verify.cases_of_zero3_hold, Docs.a_name_is_found,\n"
                      "Python.two_words, properties/{a,b}.cpp\n",
    "examples/CMakeLists.txt": "add_executable(tiny tiny.cpp)\n",
    "examples/tiny.cpp": "// Does nothing.\nnamespace {}\n  int main() {}\n",
    "impl/include/shardproof/algebra/mesh.h": "",
    "properties/a.cpp": "RC_GTEST_PROP(Layout, one_copy_tiles_the_tensor, ()) {}\n",
    "properties/b.cpp": "TEST(Layout, one_dim_is_a_row) {}\n",
    "properties/ci.cmake": "shardproof_python_tests(NAME docs CLASS Docs)\n"
                           "add_test(NAME \"Verify.${name}\" COMMAND verify)\n"
                           "shardproof_verify(cases_of_${strategy}_hold harness)\n"
                           "add_test(NAME Gpu.a_case_of_${model}_holds COMMAND verify)\n",
    "python/tests/test_two_words.py": "",
    "ci/tests/docs_test.py": "class Docs:\n    def test_a_name_is_found(self):\n        pass\n",
}


class CheckDocs(unittest.TestCase):
    def found(self, changes):
        """What is said about the clean documents with these files added, replaced or (None) removed."""
        return judged(check_docs.violations, {**CLEAN, **changes})

    def expect(self, text, message):
        self.assertEqual(self.found({"docs/page.md": "Text.\n" + text + "\n"}), [("docs/page.md", 2, message)])

    def test_documents_that_name_what_exists_have_no_violation(self):
        self.assertEqual(self.found({}), [])

    def test_a_test_that_does_not_exist_is_found(self):
        for name in ("Layout.one_copy_tiles_a_box", "Gpu.a_case_of_mlp_fails", "Verify.cases_of_zero3_fail",
                     "Docs.a_name_is_lost", "Layout.two_copies_*", "Python.three_words"):
            self.expect(f"It is tested ({name}).", f"there is no test {name}")

    def test_a_test_that_is_renamed_is_found(self):
        renamed = "RC_GTEST_PROP(Layout, one_copy_tiles_it, ()) {}\n"
        self.assertEqual(self.found({"properties/a.cpp": renamed}),
                         [("docs/layout.md", 4, "there is no test Layout.one_copy_tiles_the_tensor")])

    def test_a_test_has_to_be_named_whole(self):
        self.expect("Layout.one_copy_...", "there is no test Layout.one_copy_...")

    def test_a_file_that_does_not_exist_is_found(self):
        self.expect("See `properties/c.cpp`.", "there is no file properties/c.cpp")
        self.expect("See properties/{a,c}.cpp.", "there is no file properties/{a,c}.cpp")
        self.expect("See `properties/zoo/*.cpp`.", "there is no file properties/zoo/*.cpp")

    def test_a_header_that_does_not_exist_is_found(self):
        self.expect("See `algebra/meshes.h`.", "there is no header impl/include/shardproof/algebra/meshes.h")
        self.expect("See `shardproof/algebra/meshes.h`.", "there is no header impl/include/shardproof/algebra/meshes.h")

    def test_a_link_that_leads_nowhere_is_found(self):
        self.expect("[here](gone.md#words)", "there is no file gone.md to follow")
        self.expect("[here](layout.md#words)", "layout.md has no heading #words")
        self.assertEqual(self.found({"docs/page.md": "[here](layout.md#the-words)\n"}), [])

    def test_a_program_that_no_list_makes_is_found(self):
        self.expect("Run build/giant --help", "no CMake list makes build/giant")

    def test_a_line_of_text_with_more_than_120_columns_is_found(self):
        self.expect("words " * 20 + "x", "the line has 121 columns, and 120 is the limit")
        wide = ["words " * 19 + "words", "| " + "words " * 21 + "|", "x" * 121, "```text\n" + "words " * 21 + "\n```"]
        for text in wide:
            self.assertEqual(self.found({"docs/page.md": text + "\n"}), [], text)

    def test_a_page_that_the_contents_of_the_site_lack_is_found(self):
        site = "not_in_nav: |\n  findings/*.md\nnav:\n  - Start: index.md\n  - Use:\n      - The algebra: layout.md\n"
        self.assertEqual(self.found({"mkdocs.yml": site}), [])
        self.assertEqual(self.found({"mkdocs.yml": site, "docs/howto/new.md": "Text.\n"}),
                         [("docs/howto/new.md", 1, "the page is not in `nav` of mkdocs.yml")])

    def test_pages_in_folders_below_are_read_too(self):
        self.assertEqual(self.found({"docs/howto/page.md": "[here](gone.md)\n", "CONTRIBUTING.md": "[there](lost.md)\n"}),
                         [("CONTRIBUTING.md", 1, "there is no file lost.md to follow"),
                          ("docs/howto/page.md", 1, "there is no file gone.md to follow")])

    def test_a_block_without_a_kind_is_found(self):
        kinds = "kinds are run, nightly, from, installs, launcher, gpu, edits, long, shape, and ```text for what is no code"
        self.expect("```sh\nbuild/tiny\n```", f"the block's kind is ''; {kinds}")
        self.expect("```python sometimes\nx = 1\n```", f"the block's kind is 'sometimes'; {kinds}")
        self.assertEqual(self.found({"docs/page.md": "Text.\n\n    build/tiny --help\n"}),
                         [("docs/page.md", 3, "a block without a kind; begin it with ```sh run, ```text or another kind "
                                              "(ci/pages/blocks.py)")])

    def test_a_block_that_is_no_longer_a_part_of_its_source_is_found(self):
        self.expect("```cpp from=examples/tiny.cpp\nint main() { return 1; }\n```",
                    "the block is not a part of examples/tiny.cpp")
        found = self.found({"docs/page.md": "```cpp from=examples/gone.cpp\nint main() {}\n```\n"})
        self.assertEqual(set(found), {("docs/page.md", 1, "there is no file examples/gone.cpp")})

    def test_a_block_that_cannot_be_executed_alone_is_found(self):
        self.expect("```cpp run\nint main() {}\n```",
                    "blocks of cpp cannot be executed alone; name a source that is built: from=PATH")

    def test_an_explanation_of_a_command_that_would_be_pasted_with_it_is_found(self):
        message = "an explanation of a command begins with #, so that the line can be pasted"
        text = "Text.\n```sh run\nbuild/tiny %s\n```\n"
        for words in ("-x    says nothing", "--name 'a b'     the user's name"):
            self.assertEqual(self.found({"docs/page.md": text % words}), [("docs/page.md", 3, message)], words)
        for words in ("-x    # says nothing", "--name 'a    b'", "--name \"a    b\"   # why", "-x \\\n    --more"):
            self.assertEqual(self.found({"docs/page.md": text % words}), [], words)

    def test_what_goes_on_with_an_item_of_a_list_is_no_block(self):
        self.assertEqual(self.found({"docs/page.md": "- An item.\n\n    It goes on.\n"}), [])


if __name__ == "__main__":
    unittest.main()
