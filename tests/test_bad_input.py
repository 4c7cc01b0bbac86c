"""Bad input: one line that says what is wrong, exit code 2, no traceback, one rank speaks, nothing changed on disk."""

import re
import sys
from pathlib import Path

import pytest
from conftest import ROOT, case, copy_of, execute, in_one_process, load_module, run

pytestmark = pytest.mark.fault

FLAGS = [  # of a chapter, where {} is a folder, and what the line has to say
    ("--btach-size 8", "--btach-size"),
    ("--epoch 3", "--epoch"),  # there are no abbreviations
    ("--dataset cifar", "--dataset.*cifar.*digits"),
    ("--batch-size 0", "--batch-size.*0.*whole number from 1"),
    ("--epochs many", "--epochs.*many"),
    ("--results {}/new --lr nan", "--lr has to be above 0"),
    ("--batch-size 8 --global-batch-size 16", "--global-batch-size.*--batch-size"),
    ("--batch-size 1438", "1437 training images, fewer than the .*--dataset synthetic"),
    ("--dataset synthetic --image-size 3", "--image-size"),
    ("--device cuda", "there is no such GPU.*--device cpu"),
    ("--precision bf16 --model resnet18 --device cpu", "16 pixels or fewer"),  # PyTorch's gradients would be random
    ("--dataset mnist --data-dir {}/file", "no whole mnist.*--dataset digits"),
    ("--results {}/missing/new", "cannot write .*missing/new"),
    ("--checkpoint {}/missing/new", "cannot write .*missing/new"),
    ("--checkpoint {}/file", "exists.*--resume"),
    ("--resume", "--resume: .*--checkpoint"),
    ("--resume --checkpoint {}/none", "there is no checkpoint .*none: leave out --resume"),
    ("--resume --checkpoint {}/file", "cannot continue from .*file"),
    ("--results {}/new --lr 1e12 --epochs 1", "nan in epoch 1.*--lr"),
]
ONE_PROCESS = [  # ranks in the environment of a program that is one
    ({rank: "0", ranks: "2"}, f"{ranks}=2, but this program sees 1") for rank, ranks in (
        ("RANK", "WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"), ("HOROVOD_RANK", "HOROVOD_SIZE"))]
OTHERS = [  # words of programs that are no chapter's, and what the line has to say
    ("submit/sweep.py weekly --results {}/new", "weekly"),
    ("submit/sweep.py weak --results {}/missing/new", "cannot write"),
    ("submit/sweep.py weak --results {}/new --chapters 07_nothing", "07_nothing is no chapter"),
    ("submit/agree.py {}/none.py", "no file"),
    ("submit/agree.py 03_ddp/your_script_ddp.py", "nobody to agree with"),
    ("submit/check_script.py {}/none", "no file"),
    ("exercises/grade.py 11", "number"),
    ("tools/environment/setup.py", "--venv"),
    ("submit/lab.sh", "up NODES"),
    ("submit/lab.sh up many", "many is not a whole number"),
    ("submit/lab.sh up 2 --rate fast", "fast is no rate"),
    ("submit/lab.sh run -n 2 true", "no lab is up"),
    pytest.param("submit/doctor.py --timeout nan", "--timeout", marks=pytest.mark.slow),  # imports all frameworks
]


@pytest.fixture
def files(tmp_path):
    """A folder with a file of something else, in which the programs run; it has to stay as it is."""
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "file").write_text("a file of something else\n")
    yield folder
    assert [path.name for path in folder.iterdir()] == ["file"]
    assert (folder / "file").read_text() == "a file of something else\n"


def refused(done, said, begins=r"main\.py: "):
    assert done.code == 2, done
    assert len(done.err.splitlines()) == 1 and re.match(begins, done.err) and re.search(said, done.err), done.err


def filled(words, folder):
    return [word.replace("{}", str(folder)) for word in words.split()]


@pytest.mark.parametrize("chapter", [case("01_single_node"), case("02_horovod/tensorflow", marks=[pytest.mark.slow])])
def test_every_mistake_is_one_line_and_leaves_the_files_alone(chapter, files):
    _, answers = in_one_process(chapter, [" ".join(filled(flags, files)) for flags, _ in FLAGS], cwd=files)
    for (flags, said), answer in zip(FLAGS, answers):
        assert isinstance(answer, str) and "\n" not in answer and re.search(said, answer), (flags, answer)


@pytest.mark.parametrize(("flags", "said"), [
    ("--dataset mnist --data-dir {}/file", "no whole mnist"), ("--resume --checkpoint {}/file", "cannot continue from"),
    ("--lr 1e12 --epochs 1", "nan in epoch 1")])
def test_one_of_two_ranks_speaks(flags, said, files):
    refused(run("03_ddp", 2, *filled(flags, files), cwd=files, timeout=60), said)


@pytest.mark.core
@pytest.mark.parametrize("chapter", [case("03_ddp"), case("02_horovod/pytorch", marks=[pytest.mark.slow])])
def test_one_of_two_ranks_speaks_under_mpiexec(chapter, files):
    done = run(chapter, 2, "--global-batch-size", 7, launcher=True, cwd=files, timeout=90)
    refused(done, "multiple of the 2 ranks")


@pytest.mark.check
@pytest.mark.parametrize(("variables", "said"), ONE_PROCESS)
def test_ranks_that_one_process_does_not_see_are_refused(variables, said, clean_environment):
    clean_environment.update(variables)
    with pytest.raises(SystemExit, match=said):
        load_module(ROOT / "01_single_node" / "ranks.py").refuse_lone_ranks(1, one_process=True)


@pytest.mark.check
@pytest.mark.parametrize(("variables", "said"), [
    ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2"), ({"WORLD_SIZE": "2", "RANK": "0"}, "WORLD_SIZE=2"),
    ({"SLURM_NTASKS": "4"}, "SLURM_NTASKS=4"),
    ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}, "HOROVOD_SIZE=2")])  # horovodrun's ranks do not meet so
def test_variables_that_are_left_from_another_job_are_refused(variables, said, clean_environment):
    clean_environment.update(variables)
    with pytest.raises(SystemExit, match=f"{said}, but this program sees 1"):
        load_module(ROOT / "03_ddp" / "ranks.py").find_ranks()


@pytest.mark.parametrize(("chapter", "text", "said"), [
    case("04_deepspeed", '{"a": 1,}', "ds_config.json"),
    case("04_deepspeed", '{"scheduler": {"type": "Nonsense"}}', "ds_config.json.*Nonsense"),  # DeepSpeed finds it
    case("05_zero", '{"zero_optimization": {"stage": 3}}', "take stage, .* out of it", marks=[pytest.mark.slow])])
def test_a_wrong_ds_config(chapter, text, said, tmp_path, files):
    main = copy_of(chapter, tmp_path / "copy")
    main.with_name("ds_config.json").write_text(text)
    refused(run(str(main), 2, "--max-steps", 1, cwd=files, timeout=60), said)


@pytest.mark.parametrize(("words", "said"), OTHERS)
def test_other_programs(words, said, files):
    program, *flags = filled(words, files)
    done = execute(["bash" if program.endswith(".sh") else sys.executable, program, *flags], cwd=ROOT, timeout=60,
                   env={"LAB": f"none{files.parent.name}", "TMPDIR": str(files.parent)})
    refused(done, said, "set-up failed: " if "setup" in program else f"{Path(program).name}:? ")
