"""The repository itself: the diff is the lesson, nothing is stale, pins in one place, no path of anybody's machine."""

import ast
import re
import sys
from pathlib import Path

import pytest
from conftest import ROOT, TRACKED, chapters, execute, pages, tracked

from submit.study import command
from tools.pages import docs, outputs

# {lesson: (most lines, the lesson it grows from, most lines added to that one)}. The design's goals stand behind those
# that are larger: there a line less would join two statements or lose a comment that a new reader had asked for.
GROWN_FROM = {  # a lesson, and the one that it is compared with
    "02_horovod/pytorch/main.py": "01_single_node/main.py",
    "02_horovod/tensorflow/main.py": "01_single_node/main_tf.py",
    "03_ddp/main.py": "01_single_node/main.py",
    "04_deepspeed/main.py": "03_ddp/main.py",
    "05_zero/main.py": "04_deepspeed/main.py",
    "05_zero/fsdp.py": "05_zero/main.py",
}
WIDTH = 100


CHAPTERS = sorted(tracked(ROOT.glob("[0-9][0-9]_*/**/*.py")))
READMES = tracked(docs.pages())
TEXTS = list(pages())


@pytest.mark.check
def test_what_every_chapter_has_is_the_same_to_the_byte():
    pairs = list(docs.copies())
    assert len(pairs) >= 10
    for master, copy in pairs:
        assert copy.read_bytes() == master.read_bytes(), f"{copy.relative_to(ROOT)}: make docs"
    listed = {path for pair in pairs for path in pair}
    names = {path.name for path in listed}
    assert [path for path in CHAPTERS if path.name in names and path not in listed] == []


@pytest.mark.check
def test_no_line_of_a_chapter_is_wider_than_a_page():
    assert len(CHAPTERS) > 20
    for path in CHAPTERS:
        assert [line for line in path.read_text().splitlines() if len(line) > WIDTH] == [], path


@pytest.mark.check
def test_a_function_that_a_lesson_keeps_is_the_same():
    """Except for main(), which is the lesson."""
    def functions(name):
        nodes = ast.parse((ROOT / name).read_text()).body
        return {node.name: ast.unparse(node) for node in nodes if isinstance(node, ast.FunctionDef)}

    kept = [(name, function) for name, base in GROWN_FROM.items()
            for function in functions(name).keys() & functions(base).keys() - {"main"}]
    changed = [(name, function) for name, function in kept
               if functions(name)[function] != functions(GROWN_FROM[name])[function]]
    assert len(kept) > 8 and changed == []


@pytest.mark.check
@pytest.mark.parametrize("path", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_readme_is_fresh(path):
    text = path.read_text()
    assert docs.render(text) == text, "make docs"  # every digit is that of a record


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in READMES if "<!-- output:" in path.read_text()],
                         ids=lambda path: str(path.relative_to(ROOT)))
def test_what_commands_print_is_what_pages_show(path):
    """But for numbers, which are another machine's, and the blanks that align them."""
    def without_numbers(text):
        return re.sub(r" *\d[\d,.]*", " #", text)

    def printed(*words):
        lines = outputs.output(*words).splitlines(keepends=True)
        return without_numbers("".join(line for line in lines if not line.startswith("  step ")))  # of a slow machine

    def masked(text):
        text = re.sub(r"(<!-- output: .*? -->\n```\n)(.*?)(```\n)",
                      lambda match: match[1] + without_numbers(match[2]) + match[3], text, flags=re.S)
        return re.sub(r"(<!-- sample: .*? -->\n```\n).*?(```\n)", r"\1\2", text, flags=re.S)

    text = path.read_text()
    assert masked(docs.render(text, printed)) == masked(text), "python -m tools.pages.outputs, and make docs"


@pytest.mark.check
def test_every_file_and_make_command_that_a_page_names_is_there():
    """From the top folder or the page's own."""
    named = re.compile(r"(?<![\w/.-])(?:\.\./)?(?:0\w+|assets|docs|exercises|submit|tests|tools)/[\w./]*"
                       r"\.(?:py|sh|pbs|slurm|md|ipynb|jsonl|csv|txt|png|svg)\b")
    commands = execute(["make", "help"], cwd=ROOT).out.split()
    for path, text in TEXTS:
        modules = [f"{name.replace('.', '/')}.py" for name in re.findall(r"-m (tools[.\w]+\w)", text)]
        for name in {*named.findall(text), *modules} - {"submit/sites/NAME.sh"}:
            assert (ROOT / name).exists() or (path.parent / name).exists(), (path, name)
        assert set(re.findall(r"`make ([a-z-]+)", text)) <= set(commands), path


@pytest.mark.check
def test_all_that_is_installed_is_pinned_in_one_place():
    """pyproject.toml says what, requirements.txt what that brings along; Horovod is built by set-up."""
    freeze = execute([sys.executable, "-m", "pip", "list", "--format=freeze"]).out.lower().replace("_", "-").split()
    pinned = set(re.findall(r"^[a-z][a-z0-9-]*==[\w.]+", (ROOT / "requirements.txt").read_text(), re.M))
    assert {line.partition("+")[0] for line in freeze} - pinned <= {"horovod==0.28.1"}
    for name in "environment.yml", "Makefile", ".ci/run":
        assert not re.search(r"==\s*\d|>=\s*\d", (ROOT / name).read_text()), name
    assert "- -r requirements.txt" in (ROOT / "environment.yml").read_text()  # conda's door leads to the same pins


@pytest.mark.check
def test_no_path_or_registry_of_a_machine_is_in_a_file():
    words = re.compile(r"/(?:work|farm|root|home/\w+)/|index-url (?!https://download\.pytorch\.org)|pypi\.\w+/simple")
    others = {path for path in TRACKED if path.suffix != ".png"} - {Path(__file__)}
    assert others and not [path for path in others if words.search(path.read_text())]


@pytest.mark.slow
@chapters("02_horovod/tensorflow")
def test_keras_fit_trains_apart_and_the_tape_does_not(chapter):
    done = execute(command("02_horovod/tensorflow/keras_trap.py", 2))
    differences = dict(re.findall(r"^(\w+) *: .* (\S+)$", done.out, re.M))
    assert float(differences["with_fit"]) > 0 and float(differences["with_tape"]) == 0, done.out + done.err
