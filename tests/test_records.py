"""What is published is of a commit: dirty trees are refused where it is written, dirty records where it is shown."""

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import records
from conftest import BIN, ROOT, execute

from tools.measuring import allreduce
from tools.notebooks import lab
from tools.pages import docs, figures, ready, slow_link

MEASURED = sorted([*records.RECORDS.glob("*.jsonl"), *records.RECORDS.glob("bench*.txt")])
IDENTITY = ["-c", "user.name=a", "-c", "user.email=a@example.org"]


def git(folder, *words):
    return subprocess.run(["git", "-C", folder, *IDENTITY, *words], capture_output=True, text=True)


def marks(path):
    """The commits that a file's records name."""
    if path.suffix == ".txt":
        return re.findall(r", (\S+), \d{4}-\d\d-\d\dT", path.read_text().splitlines()[0]) or [None]
    return [json.loads(line).get("git") for line in path.read_text().splitlines()]


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.name)
def test_what_is_published_is_of_a_commit_of_this_history(path):
    found = set(marks(path))
    assert found and all(map(records.clean, found)), f"{path.name}: {found}: make it again from a clean commit"
    if git(ROOT, "rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("a shallow clone, or no repository: the history is not here")
    for mark in found:
        assert git(ROOT, "merge-base", "--is-ancestor", mark, "HEAD").returncode == 0, f"{mark} is not in this history"


def test_the_page_says_how_each_is_made():
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## What is published")[2].partition("\n## ")[0]
    assert MEASURED and not [path.name for path in MEASURED if f"`{path.name}`" not in section]


@pytest.fixture
def tree(tmp_path):
    """A copy of the programs and the chapters, with a history of one commit."""
    folder = tmp_path / "workshop"
    for name in ["submit", "tools", *(path.name for path in ROOT.glob("[0-9][0-9]_*"))]:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in "README.md", "notebook.ipynb", "assets/records/zero.jsonl":
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}\n")
    git(folder, "init")
    git(folder, "add", ".")
    assert git(folder, "commit", "-m", "all").returncode == 0
    return folder


def mark(tree, monkeypatch):
    monkeypatch.setattr(records, "ROOT", tree)
    return records.commit()


def test_what_makes_a_tree_dirty(tree, monkeypatch):
    head = git(tree, "rev-parse", "--short", "HEAD").stdout.strip()
    assert mark(tree, monkeypatch) == head
    for name in "README.md", "notebook.ipynb", "assets/records/zero.jsonl", "submit/README.md", "results.jsonl":
        (tree / name).write_text("measured\n")
        assert mark(tree, monkeypatch) == head, f"{name} is what measuring writes"
    git(tree, "add", ".")
    assert mark(tree, monkeypatch) == f"{head}-dirty", "a new file that git knows now"
    git(tree, "rm", "--cached", "results.jsonl")
    for name in "submit/launch.py", "03_ddp/submit.slurm":
        before = (tree / name).read_text()
        (tree / name).write_text(before + "\n")
        assert mark(tree, monkeypatch) == f"{head}-dirty", name
        (tree / name).write_text(before)
        assert mark(tree, monkeypatch) == head
    (tree / "03_ddp" / "main.py").unlink()
    assert mark(tree, monkeypatch) == f"{head}-dirty"


def test_without_a_history_the_mark_says_so(tree, monkeypatch, tmp_path):
    """Also where the archive was unpacked within another repository."""
    shutil.rmtree(tree / ".git")
    assert mark(tree, monkeypatch) == "no-commit"
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "somebody else's")
    assert mark(tree, monkeypatch) == "no-commit"
    git(tree, "init")
    assert mark(tree, monkeypatch) == "no-commit"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert mark(ROOT, monkeypatch) == "no-commit"


PROGRAMS = {"zero.py": [], "steps_to_target.py": [], "notebook_seconds.py": [], "lab_live.py": [],
            "rounding.py": [], "allreduce.py": [], "lab.py": [], "reading.py": [], "demo.py": ["assets/records"],
            "sweep.py": ["weak", "--results", "assets/records/weak.jsonl"],
            "profile_step.py": ["03_ddp/main.py", "--results", "assets/records/step.jsonl"]}


@pytest.mark.parametrize("program", PROGRAMS)
def test_nothing_is_published_from_a_dirty_tree_or_without_a_history(program, tree):
    """One line, nothing run, nothing written."""
    (tree / "submit" / "check_script.py").write_text("")
    before = {path: path.read_bytes() for path in (tree / "assets" / "records").iterdir()}
    for said in "-dirty: commit or stash your changes first", "has no history: measure in a clone":
        name = program.removesuffix(".py")
        words = [f"submit/{program}"] if program == "sweep.py" else ["-m", f"tools.measuring.{name}"]
        done = execute([sys.executable, *words, *PROGRAMS[program]], cwd=tree, timeout=60)
        line = done.err.splitlines()[-1]
        assert done.code in (1, 2) and not done.out and said in line and "Traceback" not in done.err, done.err
        assert line.startswith(name) and "assets" in line
        assert {path: path.read_bytes() for path in (tree / "assets" / "records").iterdir()} == before
        shutil.rmtree(tree / ".git", ignore_errors=True)


def test_elsewhere_a_dirty_tree_may_write(tree, monkeypatch, tmp_path):
    """An attendee edits a main.py and sweeps it: the records say so, that is all."""
    monkeypatch.setattr(records, "ASSETS", tree / "assets")
    assert records.clean(mark(tree, monkeypatch))
    assert records.refusal(tree / "assets" / "records" / "weak.jsonl") is None
    (tree / "03_ddp" / "main.py").write_text("")
    assert records.refusal(tree / "assets" / "records" / "weak.jsonl") and records.refusal(tree / "assets")
    assert records.refusal(tree / "weak.jsonl") is None and records.refusal(tmp_path) is None


@pytest.fixture
def assets(tmp_path, monkeypatch):
    """A folder that takes the place of assets/, with copies of ours as if all were clean."""
    for path in MEASURED:
        text = re.sub(r'(, |"git": ")[0-9a-f]{7}(-dirty)?([,"])', r"\g<1>1234567\3", path.read_text())
        if path.suffix == ".jsonl":
            found = [json.loads(line) | {"git": "1234567"} for line in text.splitlines()]
            text = "".join(json.dumps(record) + "\n" for record in found)
        (tmp_path / path.name).write_text(text)
    monkeypatch.setattr(records, "RECORDS", tmp_path)
    return tmp_path


def needs(name):
    ready.needs(f"assets/records/{name}")


SHOWN = {"weak.jsonl": [lambda: docs.table("weak"), figures.scaling, lambda: needs("weak.jsonl")],
         "strong.jsonl": [lambda: docs.table("strong"), figures.scaling, lambda: needs("strong.jsonl")],
         "batch.jsonl": [lambda: docs.table("batch"), figures.batch_size, lambda: needs("batch.jsonl")],
         "zero.jsonl": [lambda: docs.table("zero", "bf16"), figures.zero, lambda: needs("zero.jsonl")],
         "rounding.jsonl": [lambda: docs.table("rounding")],
         "outputs.jsonl": [lambda: docs.recorded("03_ddp", "2", "--global-batch-size", "64")],
         "steps_to_target.jsonl": [lambda: needs("steps_to_target.jsonl")],
         "lab_live.jsonl": [lambda: needs("lab_live.jsonl"), lab.recorded],
         "notebook_seconds.jsonl": [lambda: docs.table("notebook_seconds")],
         "public_scripts.jsonl": [lambda: docs.table("public_scripts")],
         "demo.jsonl": [lambda: docs.table("demo")], "read_data.jsonl": [lambda: docs.table("read_data")],
         "allreduce.jsonl": [lambda: needs("allreduce.jsonl")],
         "step.jsonl": [lambda: needs("step.jsonl")], "collectives.jsonl": [lambda: needs("collectives.jsonl")],
         "bench.txt": [lambda: docs.bench(1)], "bench_horovod.txt": [lambda: docs.bench(5)],
         "bench_frameworks.txt": [lambda: docs.bench(10)], "bench_start.txt": [lambda: docs.bench(3)],
         "bench_deepspeed.txt": [lambda: docs.bench(8)],
         "lab.jsonl": [slow_link.TEXTS["weak"], slow_link.draw], "lab_allreduce.jsonl": [slow_link.TEXTS["wire"]]}


def test_all_that_is_published_is_tried_below():
    assert SHOWN.keys() == {path.name for path in MEASURED}


@pytest.mark.parametrize("name", SHOWN)
def test_what_is_not_of_a_commit_is_neither_drawn_nor_told(name, assets):
    for show in SHOWN[name]:
        show()
    text = (assets / name).read_text()
    for bad in "1234567-dirty", "no-commit", "":
        head, _, rest = text.rpartition("1234567")  # of the last record
        (assets / name).write_text(f"{head}{bad}{rest}")
        for show in SHOWN[name]:
            said = rf"^assets/records/{name}, (record \d+|first line): made by.*clean"
            with pytest.raises(records.Unpublished, match=said):
                show()


def test_the_record_s_number_is_named_and_a_notebook_shows_the_line_alone(assets):
    lines = (assets / "weak.jsonl").read_text().splitlines()
    lines[2] = lines[2].replace("1234567", "1234567-dirty")
    (assets / "weak.jsonl").write_text("\n".join(lines))
    with pytest.raises(records.Unpublished) as problem:
        needs("weak.jsonl")
    said, = problem.value._render_traceback_()
    assert said.startswith("assets/records/weak.jsonl, record 3: made by 1234567-dirty")


def test_make_docs_refuses_with_one_line(tree):
    (tree / "README.md").write_text("<!-- table: weak -->\n")
    (tree / "assets" / "records" / "weak.jsonl").write_text('{"git": "no-commit"}\n')
    done = execute([sys.executable, "-m", "tools.pages.docs"], cwd=tree, timeout=100)
    assert done.code == 1 and len(done.err.splitlines()) == 1, done.err
    assert done.err.startswith("README.md: assets/records/weak.jsonl, record 1: made by no-commit")


def test_the_figures_alone_refuse_with_one_line(assets, monkeypatch):
    (assets / "weak.jsonl").write_text('{"git": "no-commit"}\n')
    monkeypatch.setattr(figures, "FIGURES", {"scaling.png": figures.scaling})
    with pytest.raises(SystemExit, match=r"^scaling.png: assets/records/weak.jsonl, record 1: made by no-commit"):
        figures.main()


def test_the_study_of_all_reduces_says_what_can_be_looked_up(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "ASSETS", tmp_path / "other")
    launch_all = allreduce.launch_all
    for name, value in {"RECORDS": tmp_path / "r.jsonl", "RANKS": (2,), "RUNS": 1, "REPEATS": 1, "launch_all":
                        lambda *words, **options: launch_all(*words, "--sizes", 4000, **options)}.items():
        monkeypatch.setattr(allreduce, name, value)
    allreduce.main()
    found = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert [record["algorithm"] for record in found] == ["everyone_to_everyone", "reduce_and_broadcast", "ring", "gloo",
                                                         "mpi"]
    for record in found:
        assert all(record[name] for name in ("git", "processor", "host", "cpus", "python", "torch", "mpi", "time"))


def test_trying_a_file_leaves_everything_as_it_was(tmp_path):
    old, link = tmp_path / "old", tmp_path / "link"
    old.write_text("a record\n")
    os.utime(old, (1, 1))
    link.symlink_to(tmp_path / "missing" / "file")
    assert records.opens(old) and records.opens(tmp_path / "new")
    assert not any(map(records.opens, (tmp_path, link, tmp_path / ("x" * 300), "/proc/nope")))
    assert {*tmp_path.iterdir()} == {old, link} and (old.read_text(), old.stat().st_mtime) == ("a record\n", 1)
    with ThreadPoolExecutor(1) as other:
        trying = other.submit(lambda: all(records.opens(tmp_path / "new") for _ in range(2000)))
        seen = sum((tmp_path / "new").exists() for _ in iter(trying.done, True))
    assert trying.result() and not seen, "another job may write it meanwhile, and would lose what it wrote"


def test_a_run_s_own_records_name_the_commit_too(tmp_path):
    """A study elsewhere, on whatever tree this is."""
    done = execute([BIN / "mpiexec", "-n", 2, sys.executable, "-m", "tools.measuring.profile_step", "03_ddp/main.py",
                    "--results", tmp_path / "step.jsonl"], cwd=ROOT)
    assert done.code == 0, done.err
    for line in (tmp_path / "step.jsonl").read_text().splitlines():
        assert re.fullmatch(r"[0-9a-f]{7,}(-dirty)?|no-commit", json.loads(line)["git"])
