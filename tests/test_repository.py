"""The repository: copies are equal, pages are fresh, versions are pinned in one place."""

import ast
import re
import sys
from pathlib import Path

import pytest
from conftest import ROOT, TRACKED, execute, tracked

from submit.study import command, missing
from tools.pages import docs, outputs

GROWN_FROM = {  # a lesson, and the one that it is compared with
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
def test_what_every_chapter_has_is_the_same_to_the_byte():
    pairs = list(docs.copies())
    assert len(pairs) >= 10
    for master, copy in pairs:
        assert copy.read_bytes() == master.read_bytes(), f"{name_of(copy)}: make docs"


@pytest.mark.check
def test_a_function_that_a_lesson_keeps_is_the_same():
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


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in PAGES if "<!-- output:" in path.read_text()],
                         ids=name_of)
def test_what_commands_print_is_what_pages_show(path):
    """Except for numbers, which are another machine's, and the blanks that align them."""
    def without_numbers(text):
        return re.sub(r" *\d[\d,.]*", " #", text)

    def printed(*words):
        lines = outputs.output(*words).splitlines(keepends=True)
        # A slow machine also prints a line for some steps.
        return without_numbers("".join(line for line in lines if not line.startswith("  step ")))

    def masked(text):
        text = re.sub(r"(<!-- output: .*? -->\n```\n)(.*?)(```\n)",
                      lambda match: match[1] + without_numbers(match[2]) + match[3], text,
                      flags=re.S)
        return re.sub(r"(<!-- sample: .*? -->\n```\n).*?(```\n)", r"\1\2", text, flags=re.S)

    text = path.read_text()
    assert masked(docs.render(text, printed)) == masked(text), "python -m tools.pages.outputs"


@pytest.mark.check
@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_every_file_and_make_command_that_a_page_names_is_there(path):
    """From the top folder or the page's own."""
    text = path.read_text()
    named = re.findall(r"(?<![\w/.-])(?:\.\./)?(?:0\w+|assets|docs|exercises|submit|tests|tools)"
                       r"/[\w./]*\.(?:py|sh|pbs|slurm|md|ipynb|jsonl|csv|txt|png|svg)\b", text)
    modules = [f"{name.replace('.', '/')}.py" for name in re.findall(r"-m (tools[.\w]+\w)", text)]
    for name in {*named, *modules} - {"submit/sites/NAME.sh"}:
        assert (ROOT / name).exists() or (path.parent / name).exists(), name
    commands = execute(["make", "help"], cwd=ROOT).out.split()
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= set(commands)


@pytest.mark.check
def test_all_that_is_installed_is_pinned_in_one_place():
    """pyproject.toml says what, requirements.txt what that brings along; set-up builds Horovod."""
    pip = [sys.executable, "-m", "pip", "list", "--format=freeze"]
    installed = execute(pip).out.lower().replace("_", "-").split()
    pins = re.findall(r"^[a-z][a-z0-9-]*==[\w.]+", (ROOT / "requirements.txt").read_text(), re.M)
    others = {line.partition("+")[0] for line in installed} - set(pins)
    assert others <= {"horovod==0.28.1"}
    for name in "environment.yml", "Makefile", ".ci/run":
        assert not re.search(r"==\s*\d|>=\s*\d", (ROOT / name).read_text()), name
    # conda's door leads to the same pins
    assert "- -r requirements.txt" in (ROOT / "environment.yml").read_text()


@pytest.mark.check
def test_no_path_or_registry_of_a_machine_is_in_a_file():
    words = re.compile(r"/(?:work|farm|root|home/\w+)/"
                       r"|index-url (?!https://download\.pytorch\.org)|pypi\.\w+/simple")
    files = {path for path in TRACKED if path.suffix != ".png"} - {Path(__file__)}
    assert not [path for path in files if words.search(path.read_text())]


@pytest.mark.slow
@pytest.mark.skipif(bool(missing("02_horovod")), reason=str(missing("02_horovod")))
def test_keras_fit_trains_apart_and_the_tape_does_not():
    done = execute(command("02_horovod/tensorflow/keras_trap.py", 2))
    differences = dict(re.findall(r"^(\w+) *: .* (\S+)$", done.out, re.M))
    assert float(differences["with_fit"]) > 0 and float(differences["with_tape"]) == 0
