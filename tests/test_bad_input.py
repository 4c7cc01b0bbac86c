"""Bad input: one line that says what is wrong, exit code 2, nothing changed on disk, no hang."""

import re
import sys
from pathlib import Path

import pytest
from conftest import ROOT, case, copy_of, execute, in_one_process, refused, run

pytestmark = pytest.mark.fault
slow = [pytest.mark.slow]

FLAGS = [  # flags of a chapter ({}: a folder), and the expected message
    ("--btach-size 8", "--btach-size"),
    ("--epoch 3", "--epoch"),  # there are no abbreviations
    ("--dataset cifar", "--dataset.*cifar.*digits"),
    ("--batch-size 0", "--batch-size has to be 1 or more"),
    ("--epochs many", "--epochs.*many"),
    ("--results {}/new --lr nan", "--lr has to be"),
    ("--batch-size 8 --global-batch-size 16", "--global-batch-size.*--batch-size"),
    ("--batch-size 1438", "1437 training images, fewer than the .*--dataset synthetic"),
    ("--dataset synthetic --image-size 3", "--image-size"),
    ("--device cuda", "GPU.* --device cpu"),
    ("--precision bf16 --model resnet18 --device cpu", "16 pixels or fewer"),
    ("--dataset mnist --data-dir {}/file", "mnist is missing or incomplete.*--dataset digits"),
    ("--results {}/missing/new", "cannot write .*missing/new"),
    ("--checkpoint {}/missing/new", "cannot write .*missing/new"),
    ("--checkpoint {}/file", "exists.*--resume"),
    ("--resume", "--resume: .*--checkpoint"),
    ("--resume --checkpoint {}/none", "there is no checkpoint .*none: remove --resume"),
    ("--results {}/new --lr 1e12 --epochs 1", "nan in epoch 1.*--lr"),
]
OTHERS = [  # commands of other programs, and the expected message
    ("submit/sweep.py weekly --results {}/new", "weekly"),
    ("submit/sweep.py weak --results {}/missing/new", "cannot write"),
    ("submit/agree.py {}/none.py", "no file"),
    ("submit/agree.py 03_ddp/your_script_ddp.py", "needs at least 2 ranks"),
    ("submit/check_script.py {}/none", "no file"),
    ("submit/predict.py {}/none", "no record"),
    ("submit/predict.py exercises/10_predict/run.jsonl --measured {}/none", "no all-reduces"),
    ("submit/predict.py exercises/10_predict/run.jsonl --node-link 1e9 --csv {}/missing/x",
     "missing"),
    ("submit/agree.py --results {}/missing/x 03_ddp/your_script.py", "cannot write"),
    ("submit/predict.py exercises/10_predict/run.jsonl", "--node-link: give a number"),
    ("submit/predict.py exercises/10_predict/run.jsonl --site none", "--site none: "),
    ("submit/predict.py exercises/10_predict/run.jsonl --node-link 1 --nodes 0", "--nodes"),
    ("exercises/grade.py 11", "number"),
    ("tools/environment/setup.py", "--venv"),
    ("submit/lab.sh up many", "many is not a whole number"),
    ("submit/lab.sh run -n 2 true", "no lab is up"),
    pytest.param("submit/doctor.py --timeout nan", "--timeout", marks=slow),  # slow to import
]


@pytest.fixture
def files(tmp_path):
    """A folder with an unrelated file, in which the programs run; it must not change."""
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "file").write_text("an unrelated file\n")
    yield folder
    assert [path.name for path in folder.iterdir()] == ["file"]
    assert (folder / "file").read_text() == "an unrelated file\n"


def arguments_of(text, folder):
    return text.replace("{}", str(folder)).split()


@pytest.mark.parametrize("chapter", [
    case("01_single_node"), case("02_horovod/tensorflow", marks=slow)])
def test_bad_flags_of_chapters(chapter, files):
    rows = [" ".join(arguments_of(flags, files)) for flags, _ in FLAGS]
    _, ends = in_one_process(chapter, rows, cwd=files)
    for (flags, message), end in zip(FLAGS, ends):
        assert isinstance(end, str) and "\n" not in end, (flags, end)
        assert re.search(message, end), (flags, end)


@pytest.mark.parametrize(("flags", "message"), [
    ("--dataset mnist --data-dir {}/file", "mnist is missing or incomplete"),
    ("--lr 1e12 --epochs 1", "nan in epoch 1")])
def test_error_is_printed_once(flags, message, files):
    done = run("03_ddp", 2, *arguments_of(flags, files), cwd=files, timeout=60)
    refused(done, message)
    assert done.err.count("\n") == 1, done.err


@pytest.mark.core
@pytest.mark.parametrize("chapter", [case("03_ddp"), case("02_horovod/pytorch", marks=slow)])
def test_bad_flag_ends_mpiexec(chapter, files):
    done = run(chapter, 2, "--global-batch-size", 7, launcher=True, cwd=files, timeout=90)
    refused(done, "--global-batch-size: 7 is not a multiple of 2")


@pytest.mark.parametrize(("chapter", "text", "message"), [
    case("04_deepspeed", '{"a": 1,}', "ds_config.json"),
    case("04_deepspeed", '{"bf16": {"enable": true}}', "ds_config.json.* enable "),
    case("05_zero", '{"zero_optimization": {"stage4": 1}}', "ds_config.json.* stage4 ", marks=slow),
    case("05_zero", '{"zero_optimization": {"stage": 3}}', "remove stage, ", marks=slow)])
def test_a_wrong_ds_config(chapter, text, message, tmp_path, files):
    main = copy_of(chapter, tmp_path / "copy")
    main.with_name("ds_config.json").write_text(text)
    refused(run(main, 2, "--max-steps", 1, cwd=files, timeout=60), message)


@pytest.mark.parametrize(("text", "message"), OTHERS)
def test_bad_flags_of_tools(text, message, files):
    program, *flags = arguments_of(text, files)
    shell = "bash" if program.endswith(".sh") else sys.executable
    done = execute([shell, program, *flags], cwd=ROOT, timeout=60,
                   env={"LAB": f"none{files.parent.name}", "TMPDIR": str(files.parent)})
    assert done.code == 2 and done.err.count("\n") == 1, done
    refused(done, message, "set-up failed" if "setup" in program else Path(program).name)
