"""Hooks of the site's generator (mkdocs.yml): they add the pages that lie elsewhere in the tree, the reference, and the tables
of ci/periphery.

README.md is the first page. Links between documents are written as they lie in the tree, so that they also work where the tree
is read, and are turned into links between pages here.
"""
import ast
import importlib.machinery
import importlib.util
import os
import posixpath
import re
import sys

from mkdocs.structure.files import File

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(ROOT, "ci"))
# pylint: disable=wrong-import-position
from pages import blocks, reference  # noqa: E402

# Documents outside of docs/, and the pages that they become.
OUTSIDE = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md",
           "LICENSE": "LICENSE.md", "harness/faults/README.md": "catalogue.md",
           "ci/lib/zoo/models.md": "zoo_models.md"}
LINK = re.compile(r"(\]\()([^)#:\s]+)((?:#[^)]*)?\))")


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        return file.read()


def rooms():
    """The rooms of ci/check_layers, bottom up."""
    return ast.literal_eval(re.search(r"^ROOMS = (\[.*?\])", read("ci/check_layers"), re.DOTALL | re.MULTILINE).group(1))


def page_of(path):
    """The page that a document of the tree becomes, or None."""
    if path in OUTSIDE:
        return OUTSIDE[path]
    return path[len("docs/"):] if path.startswith("docs/") else None


def document_of(page):
    return next((path for path, target in OUTSIDE.items() if target == page), "docs/" + page)


def periphery_tables():
    loader = importlib.machinery.SourceFileLoader("periphery", os.path.join(ROOT, "ci", "periphery"))
    script = importlib.util.module_from_spec(importlib.util.spec_from_loader("periphery", loader))
    loader.exec_module(script)
    return script.tables(script.judge(ROOT)[1])


def on_config(config):
    order = list(reference.pages(ROOT, rooms()))
    names = {path: os.path.basename(path)[:-len(".md")] for path in order}
    rooms_nav = [{names[path].replace("_", "/"): path} for path in order if path != "reference/index.md"]
    config.nav.append({"Reference": ["reference/index.md", *rooms_nav]})
    return config


def on_files(files, config):
    for path, page in OUTSIDE.items():
        text = read(path)
        files.append(File.generated(config, page, content=f"# Licence\n\n{text}" if path == "LICENSE" else text))
    for page, text in reference.pages(ROOT, rooms()).items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    """Takes off blocks what says how they are tested, and turns links in the tree into links of pages."""
    source = page.file.src_uri
    if source.startswith("reference/"):
        return markdown
    if source == "periphery.md":
        markdown += "\n" + periphery_tables()
    folder = posixpath.dirname(document_of(source))

    def relinked(match):
        target = page_of(posixpath.normpath(posixpath.join(folder, match.group(2))))
        if target is None:
            return match.group(0)
        return match.group(1) + posixpath.relpath(target, posixpath.dirname(source) or ".") + match.group(3)

    return LINK.sub(relinked, blocks.without_kinds(markdown))
