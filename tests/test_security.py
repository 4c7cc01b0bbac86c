"""No secret is written or printed, and no shell evaluates user input."""

import sys

import pytest
from conftest import BIN, NO_NETWORK, ROOT, run_command

SECRETS = {"AWS_SECRET_ACCESS_KEY": "hush-1", "HF_TOKEN": "hush-2",
           **dict.fromkeys(NO_NETWORK, "http://me:hush-3@127.0.0.1:9")}
SWEEP = [sys.executable, "-m", "cluster.sweep", "weak", "--chapters", "01_single_node",
         "--ranks", 1, "--repeats", 1, "--results", "results", "--", "--max-steps", 6]
DOCTOR = [BIN / "mpiexec", "-n", 2, sys.executable, "-m", "cluster.doctor"]
PYTHON_PATH = {"PYTHONPATH": str(ROOT)}  # the commands run in another folder
SHELL_SYNTAX = "$(touch {0})`touch {0}`; touch {0} && touch {0} | touch {0}\n touch {0}"


@pytest.mark.parametrize("command", [
    pytest.param(SWEEP, id="sweep.py"),
    pytest.param(DOCTOR, id="doctor.py", marks=pytest.mark.slow)])
def test_no_secret_is_written_or_printed(command, tmp_path):
    result = run_command(command, env=SECRETS | PYTHON_PATH, timeout=120, cwd=tmp_path)
    records = "".join(path.read_text() for path in tmp_path.glob("results*"))
    assert result.code == 0 and "hush" not in result.out + result.err + records, result
    assert '"git"' in records or "no problems found" in result.out


@pytest.mark.fault
@pytest.mark.parametrize(("command", "argument"), [
    ([*SWEEP, "--dataset", "mnist", "--data-dir"], SHELL_SYNTAX),  # passed on to the sweep's runs
    (["bash", ROOT / "cluster" / "lab.sh", "up"], "UID[$(touch {0})]")],  # bash would evaluate it
    ids=["sweep.py", "lab.sh"])
def test_no_shell_evaluates_user_input(command, argument, tmp_path):
    created = tmp_path / "created"
    result = run_command([*command, argument.format(created)], timeout=60, cwd=tmp_path,
                         env=PYTHON_PATH)
    assert result.code and not created.exists(), result
