"""The repository: copies are equal, pages are fresh, versions are pinned in one place."""

import ast
import re
from pathlib import Path

import pytest
from conftest import ROOT, TRACKED, execute, tracked

from tools.pages import docs

GROWN_FROM = {  # {lesson: the lesson that it is compared with}
    "02_horovod/pytorch/main.py": "01_single_node/main.py",
    "02_horovod/tensorflow/main.py": "01_single_node/main_tf.py",
    "03_ddp/main.py": "01_single_node/main.py",
    "04_deepspeed/main.py": "03_ddp/main.py",
    "05_zero/main.py": "04_deepspeed/main.py",
    "05_zero/fsdp.py": "05_zero/main.py",
}
PAGES = tracked(docs.pages())


def name_of(path):
    return str(path.relative_to(ROOT))


@pytest.mark.check
def test_copies_are_identical():
    pairs = list(docs.copies())
    assert len(pairs) >= 10
    for master, copy in pairs:
        assert copy.read_bytes() == master.read_bytes(), f"{name_of(copy)}: make docs"


@pytest.mark.check
def test_functions_shared_by_lessons_are_equal():
    """Except for main(), which is the lesson."""
    def functions(name):
        nodes = ast.parse((ROOT / name).read_text()).body
        return {node.name: ast.unparse(node) for node in nodes
                if isinstance(node, ast.FunctionDef) and node.name != "main"}

    common = [(name, function) for name, base in GROWN_FROM.items()
              for function in functions(name).keys() & functions(base).keys()]
    changed = [(name, function) for name, function in common
               if functions(name)[function] != functions(GROWN_FROM[name])[function]]
    assert len(common) > 8 and changed == []


@pytest.mark.check
@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_page_is_fresh(path):
    text = path.read_text()
    assert docs.render(text) == text, "make docs"


@pytest.mark.check
@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_files_and_commands_named_on_pages_exist(path):
    """Relative to the top folder or the page's."""
    text = path.read_text()
    named = re.findall(r"(?<![\w/.-])(?:\.\./)?(?:0\w+|assets|docs|exercises|submit|tests|tools)"
                       r"/[\w./]*\.(?:py|sh|pbs|slurm|md|ipynb|jsonl|csv|txt|png|svg)\b", text)
    modules = [f"{name.replace('.', '/')}.py" for name in re.findall(r"-m (tools[.\w]+\w)", text)]
    for name in {*named, *modules} - {"submit/sites/NAME.sh"}:
        assert (ROOT / name).exists() or (path.parent / name).exists(), name
    commands = execute(["make", "help"], cwd=ROOT).out.split()
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= set(commands)


@pytest.mark.check
def test_no_path_or_registry_of_a_machine_is_in_a_file():
    words = re.compile(r"/(?:work|farm|root|home/\w+)/"
                       r"|index-url (?!https://download\.pytorch\.org)|pypi\.\w+/simple")
    files = {path for path in TRACKED if path.suffix != ".png"} - {Path(__file__)}
    assert not [path for path in files if words.search(path.read_text())]
