"""No secret is written or printed, and user input reaches no shell."""

import sys

import pytest
from conftest import BIN, NO_NETWORK, ROOT, execute

SECRETS = {"AWS_SECRET_ACCESS_KEY": "hush-1", "HF_TOKEN": "hush-2",
           **dict.fromkeys(NO_NETWORK, "http://me:hush-3@127.0.0.1:9")}
SUBMIT = ROOT / "submit"
SWEEP = [sys.executable, SUBMIT / "sweep.py", "weak", "--chapters", "01_single_node",
         "--ranks", 1, "--repeats", 1, "--results", "results", "--", "--max-steps", 6]
DOCTOR = [BIN / "mpiexec", "-n", 2, sys.executable, SUBMIT / "doctor.py"]
SHELL_WORDS = "$(touch {0})`touch {0}`; touch {0} && touch {0} | touch {0}\n touch {0}"


@pytest.mark.parametrize("words", [
    pytest.param(SWEEP, id="sweep.py"),
    pytest.param(DOCTOR, id="doctor.py", marks=pytest.mark.slow)])
def test_no_secret_is_written_or_printed(words, tmp_path):
    done = execute(words, env=SECRETS, timeout=120, cwd=tmp_path)
    written = "".join(path.read_text() for path in tmp_path.glob("results*"))
    assert done.code == 0 and "hush" not in done.out + done.err + written, done
    assert '"git"' in written or "nothing wrong was found" in done.out


@pytest.mark.fault
@pytest.mark.parametrize(("words", "word"), [
    ([*SWEEP, "--dataset", "mnist", "--data-dir"], SHELL_WORDS),  # passed on to the sweep's runs
    (["bash", SUBMIT / "lab.sh", "up"], "UID[$(touch {0})]")],  # bash would evaluate it
    ids=["sweep.py", "lab.sh"])
def test_user_input_reaches_no_shell(words, word, tmp_path):
    made = tmp_path / "made"
    done = execute([*words, word.format(made)], timeout=60, cwd=tmp_path)
    assert done.code and not made.exists(), done
