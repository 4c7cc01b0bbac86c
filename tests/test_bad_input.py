"""Bad input gets one line that says what is wrong, and exit code 2; no file changes."""

import re

import pytest
from conftest import ROOT, assert_refused, case, copy_and_edit, run, run_command, run_in_one_process

from cluster.launch import rank_command

pytestmark = pytest.mark.fault

BAD_FLAGS = [  # flags of a chapter ({}: a folder), and the expected message
    ("--epoch 3", "--epoch"),  # there are no abbreviations
    ("--batch-size 0", "--batch-size has to be 1 or more"),
    ("--results {}/new --lr nan", "--lr has to be"),
    ("--batch-size 1438", "1437 training images, fewer than the .*--dataset synthetic"),
    ("--dataset synthetic --image-size 3", "--image-size"),
    ("--dataset mnist --image-size 9", "--image-size: mnist has images of 28 pixels; only digits"),
    ("--device gpu", "GPU.* --device cpu"),
    ("--precision bf16 --model resnet18 --device cpu", "up to 16 x 16 pixels"),
    ("--dataset mnist --data-dir {}/file", "mnist is missing or incomplete.*--dataset digits"),
    ("--results {}/missing/new", "cannot write .*missing/new"),
    ("--checkpoint {}/missing/new", "cannot write .*missing/new"),
    ("--checkpoint {} --resume auto", "cannot write .*: name a file"),
    ("--checkpoint {}/file", "exists.*--resume"),
    ("--resume", "--resume: .*--checkpoint"),
    ("--resume --checkpoint {}/none", "there is no checkpoint .*none: remove --resume"),
    ("--results {}/new --lr 1e12 --epochs 1", "nan in epoch 1.*--lr"),
]
BAD_COMMANDS = [  # commands of other programs, and the expected message
    ("cluster.sweep weak --results {}/missing/new", "cannot write"),
    ("submit/check_script.py {}/none", "no file"),
    ("cluster/lab.sh up many", "many is not a whole number"),
    ("cluster/lab.sh run -n 2 true", "no lab is up"),
    ("cluster/lab.sh up 2", "has a blank: export TMPDIR="),
]


@pytest.fixture
def files(tmp_path):
    """Return the folder in which the programs run, with an unrelated file; it must not change."""
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "file").write_text("an unrelated file\n")
    yield folder
    assert [path.name for path in folder.iterdir()] == ["file"]
    assert (folder / "file").read_text() == "an unrelated file\n"


def test_bad_flags_of_chapters_are_refused(files):
    rows = [flags.replace("{}", str(files)) for flags, _ in BAD_FLAGS]
    _, messages = run_in_one_process("01_single_node", rows, cwd=files)
    for (flags, expected), message in zip(BAD_FLAGS, messages):
        assert isinstance(message, str) and "\n" not in message, (flags, message)
        assert re.search(expected, message), (flags, message)


@pytest.mark.core
@pytest.mark.parametrize("chapter", [
    case("03_ddp"), case("02_horovod", marks=[pytest.mark.slow])])
def test_an_error_on_two_ranks_is_printed_once(chapter, files):
    result = run(chapter, 2, "--global-batch-size", 7, launcher=True, cwd=files, timeout=90)
    assert_refused(result, "--global-batch-size: 7 is not a multiple of 2")


def test_a_wrong_ds_config_is_refused(tmp_path, files):
    main = copy_and_edit("04_deepspeed", tmp_path / "copy")
    main.with_name("ds_config.json").write_text('{"bf16": {"enable": true}}')
    assert_refused(run(main, 2, cwd=files, timeout=60), "ds_config.json.* enable ")


@pytest.mark.parametrize(("text", "message"), BAD_COMMANDS)
def test_bad_flags_of_tools_are_refused(text, message, files):
    program, *flags = text.replace("{}", str(files)).split()
    command = ["bash", program] if program.endswith(".sh") else rank_command(program, 1)
    result = run_command([*command, *flags], cwd=ROOT, timeout=60,
                         env={"LAB": f"none{files.parent.name}", "TMPDIR": f"{files.parent}/a b"})
    assert result.code == 2 and result.err.count("\n") == 1, result
    assert_refused(result, message)
