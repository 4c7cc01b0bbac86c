"""The repository itself: the diff is the lesson, nothing is stale, pins in one place, no path of anybody's machine."""

import ast
import re
import subprocess
import sys
import tomllib
from itertools import combinations

import pytest
from conftest import ROOT, chapters, execute, main_files, pages
from launch import command

from tools.measuring import outputs
from tools.pages import docs

# Functions that two lessons have under one name and that differ, because the difference is the lesson.
LESSONS = {"main": "what a framework changes in the training", "build_model": "chapter 5 trains a perceptron",
           "standardised": "DeepSpeed wants inputs of its parameters' type", "train_step": "Horovod's tape averages"}

# {lesson: (most lines, the lesson it grows from, most lines added to that one)}. The design's goals stand behind those
# that are larger: there a line less would join two statements or lose a comment that a new reader had asked for.
SIZES = {
    "01_single_node/main.py": (116, None, 0),  # 115
    "01_single_node/main_tf.py": (139, None, 0),  # 135
    "02_horovod/pytorch/main.py": (135, "01_single_node/main.py", 42),  # 40
    "02_horovod/tensorflow/main.py": (157, "01_single_node/main_tf.py", 40),  # 155
    "03_ddp/main.py": (135, "01_single_node/main.py", 46),  # 40
    "04_deepspeed/main.py": (135, "03_ddp/main.py", 40),
    "05_zero/main.py": (155, "04_deepspeed/main.py", 55),
    "05_zero/fsdp.py": (165, "05_zero/main.py", 60),
}
COMPANIONS = {"01_single_node/ranks.py": 182, "01_single_node/workshop.py": 352}
WIDTH = 100
PARAGRAPHS = 6
CONVERSIONS = {"bool", "bytes", "dict", "float", "int", "len", "list", "next", "set", "str", "tuple", "type"}


def functions(path):
    """The functions of a file, also those within functions, as {name: source without comments and layout}."""
    return {node.name: ast.dump(node) for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef)}


def chapter_files():
    """All Python that lies in a chapter's folder."""
    return sorted(ROOT.glob("[0-9][0-9]_*/**/*.py"))


def test_functions_of_one_name_are_the_same_unless_they_are_the_lesson():
    """PyTorch's and TensorFlow's chapters are compared among themselves."""
    compared, differing = 0, set()
    for framework in "import tensorflow", "import torch":
        family = [path for path in main_files() if framework in path.read_text()]
        for one, other in combinations(family, 2):
            ours, theirs = functions(one), functions(other)
            for name in ours.keys() & theirs.keys():
                compared += 1
                if ours[name] != theirs[name]:
                    differing.add(name)
    assert compared >= 5
    assert differing == set(LESSONS), "not the same, or the table has an entry that is no longer needed"


def test_what_every_chapter_has_is_the_same_to_the_byte():
    pairs = list(docs.copies())
    assert len(pairs) >= 10
    for master, copy in pairs:
        assert copy.read_bytes() == master.read_bytes(), f"{copy.relative_to(ROOT)}: make docs"
    listed = {master for master, _ in pairs} | {copy for _, copy in pairs}
    names = {path.name for path in listed}
    assert [path for path in chapter_files() if path.name in names and path not in listed] == []


def test_the_lessons_have_the_design_s_sizes():
    assert {str(path.relative_to(ROOT)) for path in main_files()} == SIZES.keys()
    for name, most in COMPANIONS.items():
        assert len((ROOT / name).read_text().splitlines()) <= most, name
    for name, (most, base, added) in SIZES.items():
        assert len((ROOT / name).read_text().splitlines()) <= most, name
        if base:
            hunks = "\n".join(docs.hunks(base, name)).splitlines()
            assert sum(line.startswith("+") for line in hunks) <= added, (base, name)


def test_a_lesson_has_six_paragraphs_each_with_its_comment():
    for path in main_files():
        body = path.read_text().partition("def main():\n")[2].partition('\n\nif __name__')[0]
        paragraphs = re.findall(r"(?:^|\n\n)    # (\w[^\n]*)\n", body)
        assert len(paragraphs) == PARAGRAPHS, (path, paragraphs)


@pytest.mark.parametrize("path", chapter_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_chapters_are_readable(path):
    """What a syntax tree can tell of it."""
    text = path.read_text()
    assert [line for line in text.splitlines() if len(line) > WIDTH] == []
    tree = ast.parse(text)
    found = []
    for node in ast.walk(tree):
        inside = [part for part in ast.walk(node) if part is not node]
        if isinstance(node, ast.Lambda) and any(isinstance(part, ast.Call) for part in inside):
            called = {part.func.id for part in inside if isinstance(part, ast.Call) and isinstance(part.func, ast.Name)}
            if called - CONVERSIONS:
                found.append((node.lineno, "a lambda that does more than compute"))
        if isinstance(node, ast.IfExp) and any(isinstance(part, ast.IfExp) for part in inside):
            found.append((node.lineno, "a conditional within a conditional"))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            if isinstance(node.value.func, ast.Name) and node.value.func.id in CONVERSIONS:
                found.append((node.lineno, "a statement kept for its exception"))
        elif isinstance(node, ast.Expr) and not isinstance(node.value, (ast.Constant, ast.Yield, ast.YieldFrom)):
            found.append((node.lineno, "a statement without an effect"))
        for name in "body", "orelse", "finalbody":
            block = getattr(node, name, [])
            lines = [one.lineno for one in block] if isinstance(block, list) else []
            if len(set(lines)) < len(lines):
                found.append((lines[0], "two statements on a line"))
        if isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple):
            pairs = [one for one in node.iter.elts if isinstance(one, ast.Tuple) and len(one.elts) == 2]
            if any(isinstance(one.elts[0], (ast.BoolOp, ast.Compare)) for one in pairs):
                found.append((node.lineno, "a tuple of conditions and messages"))
    assert not found


def imported(path):
    """The first words of what a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.split(".")[0]


def test_arrows_between_folders_go_one_way():
    """Chapters use what lies beside them; submit/ uses chapters; exercises/ and tools/ both; nobody uses the tests."""
    rooms = {name: sorted(ROOT.glob(f"{name}/**/*.py"))
             for name in ("reading_data", "submit", "exercises", "tools", "tests")}
    rooms["chapters"] = chapter_files()
    modules = {name: {path.stem for path in paths} | {name} for name, paths in rooms.items()}
    uses = {"chapters": {"chapters"}, "reading_data": {"reading_data"}, "submit": {"submit", "chapters"},
            "exercises": {"exercises", "submit", "chapters"}, "tools": {"tools", "submit", "chapters"}}
    assert all(rooms.values())
    for name, allowed in uses.items():
        known = set().union(*(modules[room] for room in allowed))
        others = set().union(*modules.values()) - known
        for path in rooms[name]:
            beside = {other.stem for other in path.parent.glob("**/*.py")} if name == "chapters" else known
            for module in imported(path):
                assert module not in others, f"{path} imports {module}"
                assert name != "chapters" or module not in modules["chapters"] - beside, f"{path} imports {module}"


def used(tree):
    """What a file imports by name, or reaches through a module that it imports, as (module's last word, name)."""
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module.split(".")[-1], alias.name) for alias in node.names)
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules |= {alias.asname or alias.name: alias.name.split(".")[-1] for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            yield modules[node.value.id], node.attr


def test_what_another_file_uses_has_type_hints():
    """Where several chapters have a file of that name, in all of them; but main.py, the lesson, is no library."""
    rooms = "[0-9][0-9]_*", "reading_data", "submit", "exercises", "tools"
    trees = {path: ast.parse(path.read_text()) for room in rooms for path in ROOT.glob(f"{room}/**/*.py")}
    uses = {use for path, tree in trees.items() for use in used(tree) if use[0] not in (path.stem, "main")}
    found, bare = set(), []
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and (path.stem, node.name) in uses:
                found.add((path.stem, node.name))
                hints = [part.annotation for part in ast.iter_child_nodes(node.args) if isinstance(part, ast.arg)]
                if None in (*hints, node.returns):
                    bare.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}")
    assert len(found) >= 70 and not bare, bare


@pytest.mark.parametrize("path", docs.readmes(), ids=lambda path: str(path.relative_to(ROOT)))
def test_readme_is_fresh(path):
    text = path.read_text()
    assert docs.render(text) == text, "make docs"  # every digit is that of a record


@pytest.mark.parametrize("path", [path for path in docs.readmes() if "<!-- output:" in path.read_text()],
                         ids=lambda path: str(path.relative_to(ROOT)))
def test_what_commands_print_is_what_pages_show(path):
    """But for numbers, which are another machine's, and the blanks that align them."""
    def without_numbers(text):
        return re.sub(r" *\d[\d,.]*", " #", text)

    def printed(*words):
        return without_numbers(outputs.output(*words))

    def masked(text):
        text = re.sub(r"(<!-- output: .*? -->\n```\n)(.*?)(```\n)",
                      lambda match: match[1] + without_numbers(match[2]) + match[3], text, flags=re.S)
        return re.sub(r"(<!-- sample: .*? -->\n```\n).*?(```\n)", r"\1\2", text, flags=re.S)

    text = path.read_text()
    assert masked(docs.render(text, printed)) == masked(text), "python -m tools.measuring.outputs, and make docs"


def test_docs_write_the_pages_that_are_asked_for_and_only_what_changed(tmp_path, monkeypatch, capsys):
    (tmp_path / "text").write_text("new\n")
    pages = [tmp_path / name / "README.md" for name in ("03_ddp", "04_deepspeed")]
    for page in pages:
        page.parent.mkdir()
        page.write_text("<!-- file: text -->\n")
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    monkeypatch.setattr(docs, "copies", lambda: [])
    monkeypatch.setattr(sys, "argv", ["docs.py", "--only", "03_ddp"])
    for printed in "written: 03_ddp/README.md\n", "":
        docs.main()
        assert capsys.readouterr().out == printed
    assert "new" in pages[0].read_text() and "new" not in pages[1].read_text()


def test_the_diff_s_check_notices_what_is_stale_missing_or_shown_twice():
    text = (ROOT / "03_ddp" / "README.md").read_text()
    hunk = re.search(r"^<!-- hunk: .* -->$", text, re.M)[0]
    stale = text.replace("+        sampler.set_epoch(epoch)", "+        sampler.set_epoch(0)")
    assert docs.render(stale, lambda *_: "") != stale
    with pytest.raises(ValueError, match="not shown"):
        docs.render(text.replace(hunk, ""), lambda *_: "")
    with pytest.raises(ValueError, match="shown twice"):
        docs.render(text + f"\n{hunk}\n", lambda *_: "")
    with pytest.raises(ValueError, match="stands in 0 hunks"):
        docs.render(text + "\n<!-- hunk: no such words -->\n", lambda *_: "")


def test_every_tolerance_is_listed_with_its_reason():
    """In tolerances.py and nowhere else: no other small number is compared with, in any test."""
    table = ROOT / "tests" / "tolerances.py"
    listed = re.findall(r"^(?:# .*\n)+((?:[A-Z][A-Z0-9_]* = .*\n)+)", table.read_text(), re.M)
    names = set(re.findall(r"^([A-Z]\w*) =", "".join(listed), re.M))
    assert names == set(re.findall(r"^([A-Z]\w*) =", table.read_text(), re.M)), "a tolerance without a reason"
    used, found = set(), []
    for path in set(ROOT.glob("tests/*.py")) - {table}:
        tree = ast.parse(path.read_text())
        used |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        compared = [node for node in ast.walk(tree) if isinstance(node, ast.Compare)
                    and any(isinstance(sign, (ast.Lt, ast.LtE, ast.Gt, ast.GtE)) for sign in node.ops)]
        compared += [word.value for node in ast.walk(tree) if isinstance(node, ast.Call) for word in node.keywords
                     if word.arg in ("abs", "rel", "atol", "rtol")]
        found += [f"{path.name}:{part.lineno}: {part.value}" for node in compared for part in ast.walk(node)
                  if isinstance(part, ast.Constant) and isinstance(part.value, float) and 0 < part.value < 0.1]
    assert not found and names <= used


def test_links_and_pictures_of_the_pages_exist():
    found = 0
    for path, text in pages():
        for target in re.findall(r"\]\((?!http)([^)#\s]+)(?:#[^)]*)?\)", text):
            assert (path.parent / target).exists(), (path, target)
            found += 1
    assert found > 100


def test_every_file_and_module_that_a_page_names_is_there():
    """From the top folder or the page's own."""
    folders = "|".join(path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0].isalnum()
                       and path.name != "results")  # what runs write
    endings = "py|sh|pbs|slurm|md|ipynb|jsonl?|csv|txt|png"
    named = re.compile(rf"(?<![\w/.-])(?:\.\./)?(?:{folders})/[\w./+-]*\.(?:{endings})\b")
    found = 0
    for path, text in pages():
        modules = [f"{name.replace('.', '/')}.py" for name in re.findall(r"-m (tools[.\w]+\w)", text)]
        for name in {*named.findall(text), *modules} - {"submit/sites/NAME.sh"}:
            assert (ROOT / name).exists() or (path.parent / name).exists(), (path, name)
            found += 1
    assert found > 100


LATER = ("What it costs", "What the older material got wrong", "Rounding under Adam", "Large batches", "Tried on")


def test_a_chapter_s_page_is_short():
    """At most 200 lines, without those that `make docs` cuts from files and runs, and the tables of measurements."""
    for path in [path for path in docs.readmes() if path.name == "README.md" and path.parent.name != "submit"]:
        text = docs.FENCE.sub("", path.read_text())
        sections = re.split(r"^(?=## )", text, flags=re.M)
        own = [one for one in sections if not one.removeprefix("## ").startswith(LATER)]
        assert sum(len(one.splitlines()) for one in own) <= 200, path


def test_every_anchor_of_the_pages_is_a_heading():
    def anchors(text):
        headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
        return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}

    found = 0
    for path, text in pages():
        for target, anchor in re.findall(r"\]\((?!http)([^)#\s]*)#([^)]+)\)", text):
            assert anchor in anchors((path.parent / target).read_text() if target else text), (path, target, anchor)
            found += 1
    assert found > 20


def test_every_command_of_make_is_in_its_help():
    done = execute(["make", "help"], cwd=ROOT)
    assert re.findall(r"^make (\S+)", done.out, re.M) == [
        "help", "setup", "exercise", "demo", "check", "test", "test-all", "test-cpus", "faults", "bench",
        "docs", "notebooks", "slides", "pins"]


def test_all_that_is_installed_is_pinned_in_one_place():
    """pyproject.toml says what, requirements.txt what that brings along; Horovod is built by set-up."""
    freeze = execute([sys.executable, "-m", "pip", "list", "--format=freeze"]).out.lower().replace("_", "-").split()
    pinned = set(re.findall(r"^[a-z][a-z0-9-]*==[\w.]+", (ROOT / "requirements.txt").read_text(), re.M))
    assert {line.partition("+")[0] for line in freeze} - pinned <= {"horovod==0.28.1"}
    for path in (ROOT / "environment.yml", ROOT / "Makefile", ROOT / ".ci" / "run"):
        assert not re.search(r"==\s*\d|>=\s*\d", path.read_text()), path


def test_nothing_but_the_tests_needs_what_the_tests_add():
    """And what runs them."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    names = {pin.partition("==")[0].replace("-", "_") for pin in groups["tests"]}
    assert {"pytest", "playwright", "ruff"} < names
    for path in [*ROOT.glob("[0-9s]*/**/*.py"), *ROOT.glob("tools/**/*.py"), *ROOT.glob("reading_data/*.py")]:
        assert not names.intersection(imported(path)), path


def test_conda_s_door_leads_to_the_same_pins():
    text = (ROOT / "environment.yml").read_text()
    assert "- -r requirements.txt" in text
    version = re.search(r"python=(3\.\d+)", text)[1]
    assert f"python{version}" in (ROOT / "Makefile").read_text()


def test_no_path_or_registry_of_a_machine_is_in_a_file():
    files = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True, check=True).stdout.split()
    words = re.compile(r"/(?:work|farm|root|home/\w+)/|index-url (?!https://download\.pytorch\.org)|pypi\.\w+/simple")
    bad = [name for name in files if (ROOT / name).suffix != ".png" and name != "tests/test_repository.py"
           and words.search((ROOT / name).read_text())]
    assert files and not bad


@chapters("02_horovod/tensorflow")
def test_keras_fit_trains_apart_and_the_tape_does_not(chapter):
    done = execute(command("02_horovod/tensorflow/keras_trap.py", 2))
    differences = dict(re.findall(r"^(\w+) *: .* (\S+)$", done.out, re.M))
    assert float(differences["with_fit"]) > 0 and float(differences["with_tape"]) == 0, done.out + done.err
