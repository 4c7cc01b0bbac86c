"""Helpers of all tests: run a chapter on real ranks, with a time-out, and read its results."""

import contextlib
import importlib.util
import io
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace

os.environ["OMP_NUM_THREADS"] = "1"  # before anything here imports PyTorch
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the tests run on CPUs

import forked
import pytest

from cluster.launch import ROOT, end_job, finish_job, install_problem, rank_command, start_job
from cluster.launch import rank_environment as environment
from cluster.records import read_records

BIN = Path(sys.executable).parent
PROGRAMS = Path(__file__).with_name("programs")
NO_NETWORK = {name: "http://127.0.0.1:9"
              for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")}
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a background job

numbers = pytest.mark.numbers  # numeric results depend on the CPU


def case(chapter, *values, marks=(), **options):
    """Return a parametrized test's case, skipped if set-up could not install the chapter."""
    return pytest.param(chapter, *values, marks=[skip_without(chapter), *marks], **options)


def skip_without(chapter):
    problem = install_problem(chapter)
    return pytest.mark.skipif(bool(problem), reason=str(problem))


def needs_root(reason):
    """Mark tests that may need root; reason: why they cannot run here, or None."""
    skip = pytest.mark.skipif(bool(reason), reason=f"{reason} (as root: make test-root)")
    return lambda test: pytest.mark.root(skip(test))


def run_command(command, timeout=300, env=None, cwd=None):
    """Return the exit code, stdout and stderr of a command; a hang fails the test."""
    job = finish_job(start_job(command, cwd, environment() | NO_NETWORK | (env or {}),
                               subprocess.PIPE), timeout)
    return SimpleNamespace(code=job.returncode, out=job.stdout, err=job.stderr)


def run_concurrently(*starts):
    """Run (command, variables) pairs at the same time. Return (exit code, output) of each."""
    processes = [start_job(command, env=environment() | variables)
                 for command, variables in starts]
    try:
        jobs = [finish_job(process, 120) for process in processes]
    finally:
        for process in processes:
            end_job(process)
    return [(job.returncode, job.stdout) for job in jobs]


def run(chapter, ranks, *flags, hook=(), launcher=False, timeout=300, env=None, cwd=None,
        variables=None):
    """Run a chapter's main.py, or another program; its ranks are forked.

    launcher: start them as an attendee does. hook: a script of tests/programs and its arguments; it
    patches one thing and then runs main.py. variables: each rank's. Return what run_command() does.
    """
    command, env = rank_command(str(chapter), ranks, *flags), env or {}
    program = command.index(sys.executable) + 1
    if hook:
        env = env | {"PYTHONPATH": str(Path(command[program]).parent)}
        command[program:program] = [PROGRAMS / hook[0], *hook[1:]]
    if launcher:
        return run_command(command, timeout, env, cwd)
    return forked.run(command[program:], ranks, environment() | NO_NETWORK | env, timeout, cwd,
                      variables)


def run_for_record(chapter, ranks, *flags, folder, **options):
    """Run a chapter, which must succeed. Return the record that it appended."""
    result = run(chapter, ranks, *flags, "--results", folder / "results.jsonl", **options)
    assert result.code == 0, result.err
    return read_records(folder / "results.jsonl")[-1]


def assert_refused(result, message, program=r"\w+\.(?:py|sh)"):
    """Assert exit code 2 and one error line from one rank."""
    errors = re.findall(rf"^{program}: .*", result.err, re.M)
    assert result.code == 2 and len(errors) == 1 and "Traceback" not in result.err, result
    assert re.search(message, errors[0]), result.err


def run_in_one_process(chapter, flag_rows, cwd):
    """Call a chapter's main() here with each row of flags.

    Return the output, and each row's exit message or None.
    """
    main, out, messages = ROOT / chapter / "main.py", io.StringIO(), []
    module = load_module(main)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.chdir(cwd)
        for flags in flag_rows:
            patch.setattr(sys, "argv", [str(main), *flags.split()])
            message, errors = None, io.StringIO()
            try:
                with contextlib.redirect_stderr(errors):
                    module.main()
            except SystemExit as end:
                message = end.code if isinstance(end.code, str) else errors.getvalue().strip()
            messages.append(message)
    return out.getvalue(), messages


GPT_SHAPE = {"layers": 2, "width": 32, "heads": 4, "context": 32}
GPT_TEXT = "".join(topics.values()).encode()[:14_800]  # of the same length in any Python


def gpt_flags(folder):
    """Return the flags of a small network of chapter 5 and of a short text: 416 sequences."""
    text = Path(folder, "text")
    text.write_bytes(GPT_TEXT)
    shape_flags = [part for name, size in GPT_SHAPE.items() for part in (f"--{name}", size)]
    return [*shape_flags, "--text", text]


def load_module(path):
    """Import a file as a module; its own folder comes first on the path."""
    spec = importlib.util.spec_from_file_location("module_under_test", path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path.parent)
        spec.loader.exec_module(module)
    return module


def copy_and_edit(source, target, *changes, name="main.py"):
    """Copy a folder of this repository and replace (old, new) texts in one file. Return its path.

    source: the folder, or a file of it such as 02_horovod/main_tf.py, which is then the one that
    is edited. Each old text must occur exactly once.
    """
    folder = ROOT / source
    if folder.suffix == ".py":
        folder, name = folder.parent, folder.name
    target.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if path.suffix in (".py", ".json"):
            shutil.copy(path, target)
    shutil.copytree(ROOT / "workshop", target / "workshop",
                    ignore=shutil.ignore_patterns("__pycache__"))
    text = (target / name).read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (target / name).write_text(text)
    return target / name


# Tracked files only: an attendee's own files are not checked.
GIT_FILES = {ROOT / name for name in run_command(["git", "-C", ROOT, "ls-files"]).out.splitlines()
             if (ROOT / name).is_file()}


def tracked_files(paths):
    return [path for path in paths if path in GIT_FILES]


# {chapter, as its records name it: lesson file}
LESSONS = {str(path.relative_to(ROOT)).removesuffix("/main.py"): path
           for pattern in ("0*/main.py", "0*/fsdp.py", "0*/two_d.py")
           for path in sorted(tracked_files(ROOT.glob(pattern)))}
