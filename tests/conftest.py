"""What the tests share: starting a chapter as an attendee does, on real ranks, with a time-out."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

THREADS = os.environ.get("TEST_THREADS", "1")  # a rank; `make test-cpus` tries another number
os.environ["OMP_NUM_THREADS"] = THREADS  # before anything here imports PyTorch
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # tests are about CPUs: a machine's GPU may be one, and ranks are several

import forked
import pytest

from submit import study
from submit.study import ROOT, command, missing
from tools.measuring.parameters import parameters  # noqa: F401  the tests import it from here
from tools.pages import docs, notebooks

BIN = Path(sys.executable).parent
PROGRAMS = Path(__file__).with_name("programs")
OBSERVED = PROGRAMS / "observed.py"
NO_NETWORK = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")}


numbers = pytest.mark.numbers  # compares numbers that depend on the CPU: `make test-cpus` runs these


def case(chapter, *values, marks=(), **options):
    """A case of a parametrized test that skips, and says why, where set-up had to leave the chapter out."""
    return pytest.param(chapter, *values, marks=[skip_without(chapter), *marks], **options)


def skip_without(chapter):
    """The mark that skips what needs a chapter which set-up had to leave out."""
    return pytest.mark.skipif(bool(missing(chapter)), reason=str(missing(chapter)))


def needs_root(reason):
    """A decorator of tests that only root can run on every system. reason: why they cannot run here, or None."""
    skip = pytest.mark.skipif(bool(reason), reason=f"{reason} (as root: make test-root)")
    return lambda test: pytest.mark.root(skip(test))


def chapters(*names):
    """Run a test for each of these chapters, or for all."""
    return pytest.mark.parametrize("chapter", [case(name) for name in names or ON])


signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would leave it ignored to all


def environment():
    """What a command of the tests finds in its environment, before what the test itself sets."""
    return study.environment() | {"OMP_NUM_THREADS": THREADS}


def execute(words, timeout=300, env=None, cwd=None):
    """Run the words of a command. Returns its code, standard output and standard error; a hang fails the test."""
    done = subprocess.run([str(word) for word in words], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=timeout, cwd=cwd, env=environment() | NO_NETWORK | (env or {}))
    return SimpleNamespace(code=done.returncode, out=done.stdout, err=done.stderr)


def side_by_side(*starts, timeout=120):
    """Start commands with environments at the same time. Returns for each its code and all that it printed."""
    processes = [subprocess.Popen([str(word) for word in words], env=environment() | env, stdin=subprocess.DEVNULL,
                                  text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for words, env in starts]
    try:
        printed = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, text) for process, text in zip(processes, printed)]


def run(chapter, ranks, *flags, launcher=False, timeout=300, env=None, cwd=None):
    """Run a chapter's main.py. Its ranks are forked, or started as an attendee starts them. Returns as execute()."""
    words = command(chapter, ranks, *flags)
    if launcher:
        return execute(words, timeout, env, cwd)
    return forked.run(words[words.index(sys.executable) + 1:], ranks, environment() | NO_NETWORK | (env or {}), timeout,
                      cwd)


def record(chapter, ranks, *flags, folder, **options):
    """Run a chapter, which has to succeed. Returns the record that it wrote."""
    results = Path(folder, f"results-{chapter.replace('/', '-')}-{ranks}.jsonl")
    results.unlink(missing_ok=True)
    done = run(chapter, ranks, *flags, "--results", results, **options)
    assert done.code == 0, done.err
    return json.loads(results.read_text())


def in_one_process(chapter, rows, **options):
    """Run a chapter's main() on one rank with each row of flags in turn: importing a framework takes the time.

    Returns all that was printed, and for each row what it exited with, or None.
    """
    done = forked.run([PROGRAMS / "in_turn.py", command(chapter, 1)[-1], json.dumps(rows)], 1,
                      environment() | NO_NETWORK, **options)
    answers = [json.loads(line[5:]) for line in done.err.splitlines() if line.startswith("end: ")]
    assert len(answers) == len(rows), done.err
    return done.out, answers


def observe(main, ranks, folder, *flags, env=None, launcher=False, timeout=300):
    """Run a chapter, or a changed copy of its main.py, under observed.py, which leaves what it saw in the folder.

    The ranks are forked, or started by a launcher. Returns what execute() does.
    """
    folder.mkdir(exist_ok=True)
    words = command(str(main), ranks, *flags)  # [mpiexec -n N] python MAIN FLAGS
    place = words.index(sys.executable) + 1
    if launcher:
        return execute([*words[:place], OBSERVED, folder, *words[place:]], timeout, env=env)
    return forked.run([OBSERVED, folder, *words[place:]], ranks, environment() | NO_NETWORK | (env or {}), timeout)


def wait(condition, seconds, what):
    """What the condition gives once it is true; the test fails where that takes longer."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.1)
    pytest.fail(f"not within {seconds} s: {what}")


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def load_module(path):
    """A chapter's file as a module, without running it; it imports what lies beside it."""
    spec = importlib.util.spec_from_file_location("main_under_test", path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path.parent)
        for name in [name for name, found in sys.modules.items()
                     if str(getattr(found, "__file__", "")).startswith(f"{ROOT}/0")]:
            patch.delitem(sys.modules, name)  # another chapter's files of the same names
        spec.loader.exec_module(module)
    return module


def copy_of(chapter, folder, *changes, name="main.py"):
    """A copy of a chapter's folder with (old, new) replaced in one of its files. Returns the copy's path.

    Each old text has to stand there once.
    """
    folder.mkdir(exist_ok=True)
    for path in (ROOT / chapter).iterdir():
        if path.suffix in (".py", ".json"):
            shutil.copy(path, folder)
    text = (folder / name).read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / name).write_text(text)
    return folder / name


@pytest.fixture
def clean_environment():
    """os.environ without any launcher's or batch system's variables; as it was again after the test."""
    before = dict(os.environ)
    for name in before:
        if name.startswith(("SLURM_", "PMI_", "OMPI_", "MV2_", "PALS_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_RANK")):
            del os.environ[name]
    yield os.environ
    os.environ.clear()
    os.environ.update(before)


# What git knows: what an attendee adds is not ours to check.
TRACKED = {ROOT / name for name in execute(["git", "-C", ROOT, "ls-files"]).out.splitlines() if (ROOT / name).exists()}


def tracked(paths):
    return [path for path in paths if path in TRACKED]


def pages():
    """What people read, as (path, text): the pages, and of the notebooks the cells and what they print."""
    yield from ((path, path.read_text()) for path in tracked(docs.pages()))
    for path in tracked(notebooks.notebooks()):
        cells = json.loads(path.read_text())["cells"]
        printed = [output.get("text") or output.get("data", {}).get("text/markdown", [])
                   for cell in cells for output in cell.get("outputs", [])]
        yield path, "\n".join(map("".join, [*(cell["source"] for cell in cells), *printed]))


def main_files():
    """Every lesson file there is, whatever chapters exist."""
    patterns = "0*/main*.py", "0*/*/main.py", "0*/fsdp.py"
    return sorted(tracked(path for pattern in patterns for path in ROOT.glob(pattern)))


LESSONS = {str(path.relative_to(ROOT)).removesuffix("/main.py"): path for path in main_files()}  # as records name them
ON = {name: 1 if name.startswith("01") else 2 for name, path in LESSONS.items()
      if "workshop.parse_args(" in path.read_text()}  # those with --model, and on how many ranks to try each
