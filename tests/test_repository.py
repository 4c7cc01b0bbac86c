"""The repository: pages are fresh, versions are pinned in one place."""

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import GIT_FILES, LESSONS, ROOT, load_module, run_command

from tools.pages import docs
from workshop.ranks import LAUNCHERS

BASE_LESSONS = {  # {lesson: the lesson that it is compared with}
    "02_horovod/main.py": "01_single_node/main.py",
    "03_ddp/main.py": "01_single_node/main.py",
    "04_deepspeed/main.py": "03_ddp/main.py",
    "05_zero/main.py": "04_deepspeed/main.py",
    "05_zero/fsdp.py": "03_ddp/main.py",
    "05_zero/two_d.py": "05_zero/fsdp.py",
}
PAGES = docs.pages()


def relative_name(path):
    return str(path.relative_to(ROOT))


@pytest.mark.check
def test_functions_shared_by_lessons_are_equal():
    """Except for main(), which is the lesson."""
    def functions(name):
        nodes = ast.parse((ROOT / name).read_text()).body
        return {node.name: ast.unparse(node) for node in nodes
                if isinstance(node, ast.FunctionDef) and node.name != "main"}

    assert {*BASE_LESSONS} | {*BASE_LESSONS.values()} == {*map(relative_name, LESSONS.values())}
    shared_functions, different_functions = [], []
    for name, base in BASE_LESSONS.items():
        own_functions, base_functions = functions(name), functions(base)
        for function in own_functions.keys() & base_functions.keys():
            shared_functions.append((name, function))
            if own_functions[function] != base_functions[function]:
                different_functions.append((name, function))
    assert len(shared_functions) > 2 and different_functions == []


@pytest.mark.check
def test_agree_knows_the_launchers_of_the_chapters():
    launchers = load_module(ROOT / "agree" / "agree" / "launcher.py").LAUNCHERS
    assert launchers.items() == LAUNCHERS.items() - {"torchrun": LAUNCHERS["torchrun"]}.items()


@pytest.mark.check
@pytest.mark.parametrize("path", PAGES, ids=relative_name)
def test_generated_parts_of_pages_are_up_to_date(path):
    text = path.read_text()
    assert docs.render(text) == text, "make docs"


@pytest.mark.check
@pytest.mark.parametrize("path", PAGES, ids=relative_name)
def test_files_and_commands_named_on_pages_exist(path):
    text = path.read_text()
    files = re.findall(r"(?<![\w/.-])(?:\.\./)?"
                       r"(?:0\w+|agree|assets|cluster|docs|exercises|submit|tests|tools)"
                       r"/[\w./]*\.(?:py|sh|pbs|slurm|md|ipynb|jsonl|csv|txt|png|svg)\b", text)
    links = re.findall(r"\]\(([\w./-]+)", re.sub(r"```.*?```", "", text, flags=re.S))
    names = {*files, *links} - {"submit/sites/NAME.sh", "https"}
    assert not [name for name in names
                if not (ROOT / name).exists() and not (path.parent / name).exists()]
    assert all(map(find_spec, re.findall(r"-m ((?:cluster|tools)[.\w]+\w)", text)))
    targets = run_command(["make", "help"], cwd=ROOT).out.split()
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= set(targets)


@pytest.mark.check
def test_no_file_has_a_path_or_registry_of_one_machine():
    forbidden_text = re.compile(r"/(?:work|farm|root|home/\w+)/"
                                r"|index-url (?!https://download\.pytorch\.org)|pypi\.\w+/simple")
    files = {path for path in GIT_FILES if path.suffix != ".png"} - {Path(__file__)}
    assert not [path for path in files if forbidden_text.search(path.read_text())]
