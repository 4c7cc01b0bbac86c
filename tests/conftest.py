"""Shared by the tests: start a chapter as an attendee does, on real ranks, with a time-out."""

import functools
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

THREADS = os.environ.get("TEST_THREADS", "1")  # per rank; `make test-cpus` tries another number
os.environ["OMP_NUM_THREADS"] = THREADS  # before anything here imports PyTorch
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the tests run on CPUs

import forked
import pytest
from filelock import FileLock
from tolerances import ROOM, distance

from submit import study
from submit.study import ROOT, command, missing
from tools.measuring.parameters import parameters

BIN = Path(sys.executable).parent
PROGRAMS = Path(__file__).with_name("programs")
NO_NETWORK = {name: "http://127.0.0.1:9"
              for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")}
GLOBAL_BATCH = 48  # divides by 1, 2, 3 and 4, and does not divide the 1,437 images
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it

numbers = pytest.mark.numbers  # numeric results depend on the CPU: `make test-cpus`


# Which tests run

def case(chapter, *values, marks=(), **options):
    """Return a case of a parametrized test, skipped if set-up had to leave the chapter out."""
    return pytest.param(chapter, *values, marks=[skip_without(chapter), *marks], **options)


def skip_without(chapter):
    return pytest.mark.skipif(bool(missing(chapter)), reason=str(missing(chapter)))


def needs_root(reason):
    """Mark tests that may need root; reason: why they cannot run here, or None."""
    skip = pytest.mark.skipif(bool(reason), reason=f"{reason} (as root: make test-root)")
    return lambda test: pytest.mark.root(skip(test))


# Starting programs

def environment():
    """Return the base environment of a command."""
    return study.environment() | {"OMP_NUM_THREADS": THREADS}


def execute(words, timeout=300, env=None, cwd=None):
    """Run a command. Return its exit code, stdout and stderr; a hang fails the test."""
    done = subprocess.run([str(word) for word in words], timeout=timeout, cwd=cwd, text=True,
                          stdin=subprocess.DEVNULL, capture_output=True,
                          env=environment() | NO_NETWORK | (env or {}))
    return SimpleNamespace(code=done.returncode, out=done.stdout, err=done.stderr)


def side_by_side(*starts, timeout=120):
    """Start (command, variables) pairs at once. Return (exit code, output) of each."""
    processes = [subprocess.Popen([str(word) for word in words], env=environment() | env, text=True,
                                  stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT) for words, env in starts]
    try:
        printed = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, text) for process, text in zip(processes, printed)]


def run(chapter, ranks, *flags, hook=(), launcher=False, timeout=300, env=None, cwd=None):
    """Run a chapter's main.py, or another program; its ranks are forked.

    launcher: start them as an attendee does. hook: a script of tests/programs and its arguments; it
    patches one thing and then runs main.py. Return what execute() returns.
    """
    words, env = command(str(chapter), ranks, *flags), env or {}
    place = words.index(sys.executable) + 1
    if hook:
        env = env | {"PYTHONPATH": str(Path(words[place]).parent)}
        words[place:place] = [PROGRAMS / hook[0], *hook[1:]]
    if launcher:
        return execute(words, timeout, env, cwd)
    return forked.run(words[place:], ranks, environment() | NO_NETWORK | env, timeout, cwd)


def record(chapter, ranks, *flags, folder, **options):
    """Run a chapter, which must succeed. Return the record that it wrote."""
    results = Path(folder, f"results-{chapter.replace('/', '-')}-{ranks}.jsonl")
    results.unlink(missing_ok=True)
    done = run(chapter, ranks, *flags, "--results", results, **options)
    assert done.code == 0, done.err
    return json.loads(results.read_text())


def refused(done, message, program=r"\w+\.py"):
    """Assert exit code 2 and one error line from one rank."""
    lines = re.findall(rf"^{program}: .*", done.err, re.M)
    assert done.code == 2 and len(lines) == 1 and "Traceback" not in done.err, done
    assert re.search(message, lines[0]), done.err


def in_one_process(chapter, rows, **options):
    """Run a chapter's main() on one rank with each row of flags, importing it only once.

    Return the output, and for each row its exit message or None.
    """
    done = run(chapter, 1, json.dumps(rows), hook=["in_turn.py"], **options)
    answers = [json.loads(line[5:]) for line in done.err.splitlines() if line.startswith("end: ")]
    assert len(answers) == len(rows), done.err
    return done.out, answers


def train(chapter, ranks, checkpoint, *flags, **options):
    """Train with the tests' global batch size. Return the parameters."""
    done = run(chapter, ranks, "--global-batch-size", GLOBAL_BATCH, "--checkpoint", checkpoint,
               *flags, **options)
    assert done.code == 0, done.err
    return parameters(checkpoint)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """Return a cached function (chapter, *flags) -> parameters of a one-rank training."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared

    @functools.cache
    def train_once(chapter, *flags, hook=()):
        name = re.sub(r"\W+", "-", " ".join(map(str, (chapter, *flags, *hook))))
        with FileLock(shared / f"{name}.lock"):
            if not (shared / name).exists():
                train(chapter, 1, shared / name, *flags, hook=hook)
        return parameters(shared / name)

    return train_once


@pytest.fixture(scope="session")
def smooth(trained):
    """Return a function epochs -> chapter 1's smooth variant: fp32 parameters, and the bound."""
    def find(epochs=1):
        twin = trained("01_single_node", "--epochs", epochs, hook=("smooth.py",))
        other = trained("01_single_node", "--epochs", epochs, hook=("smooth.py", "reversed"))
        return SimpleNamespace(parameters=twin, bound=ROOM * distance(twin, other))

    return find


def wait(condition, seconds, what):
    """Return condition() once it is true; fail the test after so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if result := condition():
            return result
        time.sleep(0.1)
    pytest.fail(f"timed out after {seconds} s waiting for: {what}")


# Files

def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def load_module(path):
    """Import a file as a module; its own folder comes first on the path."""
    spec = importlib.util.spec_from_file_location("module_under_test", path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path.parent)
        for name, other in list(sys.modules.items()):
            if str(getattr(other, "__file__", "")).startswith(f"{ROOT}/0"):
                patch.delitem(sys.modules, name)  # another chapter's files of the same names
        spec.loader.exec_module(module)
    return module


def copy_of(chapter, folder, *changes, name="main.py"):
    """Copy a chapter's folder, with (old, new) replaced in one of its files. Return its path.

    Each old text must occur exactly once.
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


# Tracked files only: an attendee's own files are not checked.
TRACKED = {ROOT / name for name in execute(["git", "-C", ROOT, "ls-files"]).out.splitlines()
           if (ROOT / name).exists()}


def tracked(paths):
    return [path for path in paths if path in TRACKED]


# All lesson files, by the name in their records
LESSONS = {str(path.relative_to(ROOT)).removesuffix("/main.py"): path
           for pattern in ("0*/main*.py", "0*/*/main.py", "0*/fsdp.py")
           for path in sorted(tracked(ROOT.glob(pattern)))}
