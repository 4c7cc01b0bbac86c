"""No secret is in what is written or printed, and no word of a user reaches a shell."""

import sys

import pytest
from conftest import BIN, NO_NETWORK, ROOT, execute

SECRETS = {"AWS_SECRET_ACCESS_KEY": "hush-1", "HF_TOKEN": "hush-2",
           **dict.fromkeys(NO_NETWORK, "http://me:hush-3@127.0.0.1:9"),
           "PIP_INDEX_URL": "https://me:hush-4@127.0.0.1:9"}
SUBMIT = ROOT / "submit"
SWEEP = [sys.executable, SUBMIT / "sweep.py", "weak", "--chapters", "01_single_node",
         "--ranks", 1, "--repeats", 1]
ON_TWO = [BIN / "mpiexec", "-n", 2, sys.executable]
SHELL_WORDS = "$(touch {0})`touch {0}`; touch {0} && touch {0} | touch {0}\n touch {0}"


@pytest.mark.parametrize(("words", "expected"), [
    pytest.param([*SWEEP, "--results", "{}", "--", "--max-steps", 6], '"git"', id="sweep.py"),
    pytest.param([*ON_TWO, SUBMIT / "agree.py", ROOT / "03_ddp" / "main.py", "--max-steps", 3],
                 "nothing wrong was found", id="agree.py", marks=pytest.mark.slow),
    pytest.param([*ON_TWO, SUBMIT / "doctor.py"], "nothing wrong was found", id="doctor.py",
                 marks=pytest.mark.slow)])
def test_no_secret_is_in_what_is_written_or_printed(words, expected, tmp_path):
    results = tmp_path / "results"
    words = [results if word == "{}" else word for word in words]
    done = execute(words, env=SECRETS, timeout=120)
    text = done.out + done.err + (results.read_text() if results.exists() else "")
    assert done.code == 0 and expected in text and "hush" not in text, text


@pytest.mark.fault
@pytest.mark.parametrize(("words", "word"), [
    ([*SWEEP, "--results", "results", "--", "--max-steps", 1, "--dataset", "mnist", "--data-dir"],
     SHELL_WORDS),  # the sweep's runs get it
    (["bash", SUBMIT / "lab.sh", "up"], "UID[$(touch {0})]")],  # bash would compute it
    ids=["sweep.py", "lab.sh"])
def test_words_of_a_user_reach_no_shell(words, word, tmp_path):
    made = tmp_path / "made"
    done = execute([*words, word.format(made)], timeout=60, cwd=tmp_path)
    assert done.code and not made.exists(), done
