"""Bad input: one line that says what is wrong, exit code 2, no traceback, one rank speaks, nothing changed on disk.

Wrong values of a chapter's flags are made from its own parser: a new flag is tried without a word here. Many rows are
tried in one process, as importing the frameworks takes the time (programs/as_main.py).
"""

import argparse
import itertools
import json
import os
import re
import sys
from pathlib import Path

import forked
import pytest
from conftest import BIN, NO_NETWORK, PROGRAMS, ROOT, case, chapters, environment, execute, load_module, run
from launch import command

PROGRAMS_OF_CHAPTERS = ("01_single_node", "01_single_node/main_tf.py", "02_horovod/pytorch", "02_horovod/tensorflow",
                        "03_ddp", "04_deepspeed", "05_zero", "05_zero/fsdp.py")
OF_SEVERAL_RANKS = PROGRAMS_OF_CHAPTERS[2:]
NOT_UTF8 = "\udcff"  # how Python shows a byte of a command line that is none
LONG = 300 * "n"  # longer than a file's name may be
HUGE = 5000 * "9"  # longer than what Python takes for a number

WRONG = {  # what a flag has to refuse, by the function that reads it
    "whole": ("0", "-1", "1.5", "many", "", "1e3", "+5", "1_000", "\u00b2", NOT_UTF8, HUGE),
    "int": ("1.5", "many", "", "nan", "1e3", NOT_UTF8, HUGE),
    "seed": ("-1", "1.5", "many", "", "4294967296", NOT_UTF8, HUGE),
    "float": ("many", "", "nan", "-1", "1,5", NOT_UTF8),
}
WRONG_OF = {  # by the flag: what the function reads, and the program refuses
    "lr": ("0", "inf"), "warmup_epochs": ("inf",), "image_size": ("5",)}
UNWRITABLE = ("{}", "{}/missing/file", "{}/file/below", "/proc/nope", f"{{}}/{LONG}", f"{{}}/{NOT_UTF8}/file")
NO_FOLDER = "{}/missing/file", f"{{}}/{NOT_UTF8}/file"  # what chapters refuse
WRONG_FILES = {  # flags that want a name: others than these have to be listed
    "results": (*NO_FOLDER, "{}", "{}/file/below"), "checkpoint": (*NO_FOLDER, "{}", "{}/file"),
    "data_dir": (),  # heeded with --dataset mnist alone: PATHS
    "local_rank": (),  # a launcher's
}
PATHS = [  # flags, and what the line has to say
    ("--dataset mnist --data-dir {}/file", "no whole mnist.*--data-dir"),
    ("--dataset svhn --data-dir {}/file", "no whole svhn.*--data-dir"),
    ("--dataset mnist --data-dir {}/file/below", "no whole mnist.*--data-dir"),
    ("--dataset svhn --data-dir /proc/nope", "no whole svhn.*--data-dir"),
    (f"--dataset mnist --data-dir {{}}/{LONG}", "no whole mnist.*--data-dir"),
    ("--resume", "--checkpoint"), ("--resume auto", "--checkpoint"), ("--resume --checkpoint=", "--checkpoint"),
    *[(f"--resume --checkpoint {name}", "there is no checkpoint.*--resume")
      for name in ("{}/none", "{}/file/below", f"{{}}/{LONG}")],
    ("--resume --results {}/new", "--checkpoint"),
]
ALONE = [  # of a program of one process: variables, what the line has to say
    ({rank: "0", ranks: "2"}, f"{ranks}=2, but this program sees 1") for rank, ranks in (
        ("RANK", "WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"), ("HOROVOD_RANK", "HOROVOD_SIZE"))]
LEFT_OVER = [  # of a program of several ranks
    ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2"), ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
    ({"WORLD_SIZE": "1000000"}, "WORLD_SIZE=1000000"), ({"SLURM_NTASKS": "4"}, "SLURM_NTASKS=4"),
    ({"WORLD_SIZE": "2", "RANK": "0"}, "WORLD_SIZE=2"),
]
CONFIGS = [  # texts of ds_config.json, and what the line has to say
    *[(text, "ds_config.json") for text in ("", "{", "{'a': 1}", "{} x", '{"a": 1,}', NOT_UTF8, "\ufeff{}")],
    ('{"train_batch_size": 8}', "--batch-size"), ('{"train_micro_batch_size_per_gpu": 8}', "--batch-size"),
    ('{"gradient_accumulation_steps": 7000}', "1437 training images"),
    ('{"fp16": {"enabled": true}}', "fp16 needs a GPU"),
]
CONFIGS_OF_ZERO = [('{"zero_optimization": {"stage": 3}}', "ds_config.json: take stage, .* out of it")]
FOR_DEEPSPEED = [  # what DeepSpeed itself has to refuse, so one a run
    ('{"zero_optimization": {"nonsense": 1}}', "nonsense"),
    ('{"zero_optimization": {"reduce_bucket_size": "many"}}', "reduce_bucket_size"),
    ('{"scheduler": {"type": "Nonsense"}}', "Nonsense"), ('{"communication_data_type": "fp7"}', "fp7"),
    ('{"optimizer": 3}', "ds_config.json"), ('{"activation_checkpointing": 3}', "ds_config.json"),
]
ON_TWO = [  # flags of two ranks
    ("--epochs 0", "--epochs"), ("--dataset cifar", "--dataset"), ("--epoch 3", "--epoch"),
    ("--batch-size 8 --global-batch-size 16", "not allowed with"), ("--lr nan", "--lr"),
    ("--global-batch-size 7", "multiple of the 2 ranks"), ("--batch-size 719", "fewer than the 1438"),
    ("--dataset mnist --data-dir {}/file", "no whole mnist"), ("--results {}/missing/file", "cannot write"),
    ("--checkpoint {}/file", "exists.*--resume"), ("--resume --checkpoint {}/file", "cannot continue from"),
]


def tree(folder):
    """All that lies in a folder: what files hold, and None for folders."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture
def files(tmp_path):
    """A folder with a file and an empty folder, in which the programs run; it has to stay as it is."""
    folder = tmp_path / "files"
    (folder / "empty").mkdir(parents=True)
    (folder / "file").write_text("a file of something else\n")
    (folder / "broken.py").write_text("def broken(:\n")
    before = tree(folder)
    yield folder
    assert tree(folder) == before


class Parsed(Exception):
    """Raised in the place of parsing, with the parser."""


def parser_of(main):
    """The parser of a chapter's program, as its own line makes it."""
    names = {"__doc__": "A program."}
    for name in ("workshop", "flags"):
        if (main.parent / f"{name}.py").exists():
            names[name] = load_module(main.parent / f"{name}.py")
    if "flags" in names:
        names["parse_args"] = names["flags"].parse_args

    def instead(parser):
        raise Parsed(parser)

    line = re.search(r"args = (.*parse_args\(__doc__.*\))", main.read_text())[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", instead)
        try:
            eval(line, names)
        except Parsed as found:
            return found.args[0]


def wrong_values(action):
    """What a flag has to refuse."""
    if action.choices:
        first = str(action.choices[0])
        return ("nonsense", "", f"{first}x", f"{first},{first}", first.upper() + "X", NOT_UTF8)
    if action.type:
        return WRONG[action.type.__name__] + WRONG_OF.get(action.dest, ())
    return WRONG_FILES[action.dest]


def wrong_flags(parser):
    """Rows of wrong flags, each with what the line has to say."""
    rows = [([word], word[:10]) for word in ("--nonsense", "-x", "more", f"--nonsense={NOT_UTF8}")]
    for action in parser._actions:
        flag = action.option_strings[-1]
        said = flag if action.type or action.choices else "cannot write|exists"
        rows += [([f"{flag}={value}"], said) for value in ([] if action.dest == "help" else wrong_values(action))]
        rows.append(([flag[:-1]], flag[:-1]))  # there are no abbreviations
        if action.nargs is None:
            rows.append(([flag], f"{flag}.*expected one argument"))
    for group in parser._mutually_exclusive_groups:
        for one, other in itertools.permutations(group._group_actions, 2):
            rows.append(([one.option_strings[0], "8", other.option_strings[0], "8"], "not allowed with"))
    return rows


def in_turn(program, rows, tmp_path, cwd, fork=True):
    """Run a program with rows of flags, variables and files. Returns for each its exit code, output and errors."""
    (tmp_path / "rows").write_text(json.dumps(rows))
    answers = tmp_path / "answers"
    answers.unlink(missing_ok=True)
    words = [PROGRAMS / "as_main.py", program, tmp_path / "rows", answers]
    if fork:
        done = forked.run(words, 1, environment() | NO_NETWORK, cwd=cwd)
    else:
        done = execute([sys.executable, *words], cwd=cwd)
    found = [json.loads(line) for line in answers.read_text().splitlines()] if answers.exists() else []
    assert len(found) == len(rows), done.err
    return found


def filled(flags, files):
    """The words of flags, where {} is the folder of files, and ROOT the checkout's."""
    words = flags.split() if isinstance(flags, str) else flags
    return [word.replace("{}", str(files)).replace("ROOT/", f"{ROOT}/") for word in words]


def refused(answer, said, begins):
    """Whether this is one line that begins so and says it, with exit code 2."""
    code, _, err = answer
    return code == 2 and len(err.splitlines()) == 1 and bool(re.match(begins, err) and re.search(said, err))


def all_refused(chapter, rows, tmp_path, files):
    """Try rows of (flags, what the line has to say, variables, files to write) of a chapter on one rank.

    Returns how many they are.
    """
    main = Path(command(chapter, 1)[-1])
    wanted = [(filled(flags, files), variables, written) for flags, _, variables, written in rows]
    answers = in_turn(main, wanted, tmp_path, files)
    taken = [(flags, variables, written, answer) for (flags, variables, written), (_, said, *_), answer
             in zip(wanted, rows, answers) if not refused(answer, said, f"{main.name}: ")]
    assert not taken, taken
    return len(rows)


@pytest.mark.fault
@chapters(*PROGRAMS_OF_CHAPTERS)
def test_wrong_values_of_every_flag(chapter, tmp_path, files):
    small = ["--width", "8", "--layers", "1"] if chapter.startswith("05") else []  # one of the rows trains an epoch
    rows = wrong_flags(parser_of(Path(command(chapter, 1)[-1])))
    all_refused(chapter, [(small + flags, said, {}, {}) for flags, said in rows], tmp_path, files)


@pytest.mark.fault
@chapters(*PROGRAMS_OF_CHAPTERS)
def test_wrong_paths(chapter, tmp_path, files):
    all_refused(chapter, [(*row, {}, {}) for row in PATHS], tmp_path, files)


@pytest.mark.fault
@chapters(*PROGRAMS_OF_CHAPTERS)
def test_wrong_variables(chapter, tmp_path, files):
    rows = ALONE if chapter.startswith("01") else LEFT_OVER
    all_refused(chapter, [([], said, variables, {}) for variables, said in rows], tmp_path, files)


def copied(chapter, tmp_path):
    """A copy of the chapter's files, its ds_config.json apart. Returns where its main.py and its ds_config.json are."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in (ROOT / chapter).glob("*.py"):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder / "main.py", folder / "ds_config.json"


@pytest.mark.fault
@chapters("04_deepspeed", "05_zero")
def test_wrong_configurations(chapter, tmp_path, files):
    main, config = copied(chapter, tmp_path)
    texts = CONFIGS + CONFIGS_OF_ZERO * (chapter == "05_zero")
    all_refused(str(main), [(["--max-steps", "1"], said, {}, {str(config): text}) for text, said in texts],
                         tmp_path, files)


@pytest.mark.fault
@pytest.mark.parametrize(("chapter", "text", "said"), [
    case(chapter, *row) for chapter in ("04_deepspeed", "05_zero") for row in (
        FOR_DEEPSPEED + [('{"zero_optimization": {"stage": 7}}', "stage")] * (chapter == "04_deepspeed"))])
def test_a_configuration_that_deepspeed_refuses(chapter, text, said, tmp_path, files):
    main, config = copied(chapter, tmp_path)
    config.write_text(text)
    done = run(str(main), 2, "--max-steps", 1, cwd=files, timeout=60)
    assert refused((done.code, done.out, done.err), said, "main.py: "), done


@pytest.mark.fault
@chapters(*OF_SEVERAL_RANKS)
def test_one_of_two_ranks_speaks(chapter, files):
    begins = f"{Path(command(chapter, 1)[-1]).name}: "
    for flags, said in ON_TWO:
        done = run(chapter, 2, *filled(flags, files), cwd=files, timeout=60)
        assert refused((done.code, done.out, done.err), said, begins), (flags, done)


@pytest.mark.fault
@pytest.mark.parametrize("launcher", ["mpiexec", "torchrun"])
@chapters(*OF_SEVERAL_RANKS)
def test_one_of_two_ranks_speaks_under_a_launcher(chapter, launcher, files):
    main = Path(command(chapter, 1)[-1])
    if launcher == "torchrun" and chapter.startswith("02"):
        flags, said = "", "WORLD_SIZE=2, but this program sees 1"  # it starts no ranks of Horovod's
    else:
        flags, said = "--global-batch-size 7", "multiple of the 2 ranks"
    words = [BIN / "torchrun", "--nproc-per-node", 2, main] if launcher == "torchrun" else command(chapter, 2)
    done = execute([*words, *filled(flags, files)], cwd=files, timeout=90)
    own = [line for line in done.err.splitlines() if line.startswith(f"{main.name}: ")]
    assert len(own) == 1 and re.search(said, own[0]), done
    assert f'File "{main}"' not in done.err, done  # torchrun has a traceback of its own
    if launcher == "mpiexec":
        assert (done.code, done.err) == (2, own[0] + "\n"), done
    else:
        assert done.code == 1, done  # torchrun's, whatever its ranks said; and it says it in pages


NUMBERS = ("0", "-1", "1.5", "many", "")  # no whole numbers above 0
SECONDS = ("0", "-1", "nan", "inf", "many", "")  # no time to wait
SWEEP = "weak --results {}/new"
SCRIPT = "ROOT/03_ddp/your_script_ddp.py"
OTHERS = {  # programs that are no chapter's main.py: flags, and what the line has to say
    "submit/sweep.py": [
        ("", "studies"), ("weekly --results {}/new", "weekly"), ("weak", "--results"), ("weak --results", "--results"),
        *[(f"{SWEEP} {flag}={value}", flag) for flag in ("--ranks", "--batch-sizes", "--batch-size", "--repeats",
                                                         "--timeout") for value in NUMBERS],
        *[(f"weak --results {name}", "cannot write") for name in UNWRITABLE],
        (f"{SWEEP} --chapters 07_nothing", "07_nothing is no chapter"), (f"{SWEEP} --chapters /", "is no chapter"),
        (f"{SWEEP} --chapters {LONG}", "is no chapter"), (f"{SWEEP} --script nonsense.sh", "--script"),
        ("strong --ranks 3 --results {}/new", "no multiple of 3 ranks"),
        ("weak --chapters 01_single_node --ranks 2 --results {}/new", "nothing to run"),
        (f"{SWEEP} --repeat 3", "--repeat"), (f"{SWEEP} --nonsense", "--nonsense"),
        (f"{SWEEP} -- --batch-size 8", "--batch-size"), (f"{SWEEP} -- --results=x", "--results"),
        (f"{SWEEP} --script submit.pbs -- --data-dir a*b", "blanks"),
    ],
    "submit/agree.py": [
        ("", "name your script"), ("{}/none.py", "no file"), ("{}/empty", "no file"), ("{}/broken.py", "line 1"),
        *[(f"--steps={value} {SCRIPT}", "--steps") for value in NUMBERS],
        *[(f"--timeout={value} {SCRIPT}", "--timeout") for value in SECONDS],
        *[(f"--record {name} {SCRIPT}", "cannot write") for name in UNWRITABLE], (f"{{}}/{LONG}", "no file"),
        ("--explain nonsense", "nonsense"), ("--explain", "--explain"), ("--nonsense", "--nonsense"),
        (f"--step 3 {SCRIPT}", "--step"), (SCRIPT, "nobody to agree with"),
        ("ROOT/01_single_node/main_tf.py", "only PyTorch's"),
    ],
    "submit/doctor.py": [
        *[(f"--timeout={value}", "--timeout") for value in SECONDS],
        ("--timeout", "--timeout"), ("--nonsense", "--nonsense"), ("--time 3", "--time"), ("more", "more"),
    ],
    "submit/check_script.py": [
        ("", "scripts"), ("{}/none", "no file"), ("{}/empty", "no file"), ("--nonsense {}/file", "--nonsense"),
        (f"{{}}/{LONG}", "no file"),
    ],
    "exercises/grade.py": [
        ("", "number"),
        *[(f"--file {{}}/broken.py -- {value}", "number") for value in ("0", "11", "-1", "1.5", "many")],
        ("1 --file {}/none.py", "none.py cannot be read"), (f"1 --file {{}}/{LONG}.py", "cannot be read"),
        ("1 --file {}/file", "in .py"), ("1 --file {}/empty", "in .py"),
        ("1 --file {}/broken.py", "broken.py line 1"), ("1 --file", "--file"), ("1 --fil {}/broken.py", "--fil"),
        ("1 2", "2"), ("1 --nonsense", "--nonsense"),
    ],
    "tools/environment/setup.py": [
        ("", "--venv"), ("--venv", "--venv"), ("--venv=", "VENV="), ("--venv {}/new --nonsense", "--nonsense")],
    "reading_data/read_data.py": [
        ("", "--way"), ("--way sideways", "--way"), ("--wa files", "--way"), ("--way files --nonsense", "--nonsense"),
        *[(f"--way files --images={value}", "--images") for value in (*NUMBERS, "65", HUGE, "640000000000")],
        *[(f"--way files --seed={value}", "--seed") for value in ("-1", "1.5", "many", "")],
        *[(f"--way files --results {name}", "cannot write") for name in UNWRITABLE],
        *[(f"--way files --folder {name}", "--folder") for name in ("{}/file", "{}/file/below", "/proc/nope")],
    ],
    "03_ddp/at_scale.py": [(value, "at_scale.py: error: ") for value in ("0", "-8", "12", "1.5", "many", "--nonsense")],
    "03_ddp/three_ways.py": [
        ("sideways", "the ways are"), ("data sideways", "the ways are"), ("", "2 or 4 ranks"),
        *[(f"{flag}={value}", flag) for flag in ("--batch-size", "--width", "--micro-batches") for value in NUMBERS],
        ("--batch-size 6", "--batch-size"), ("--batch-size 4000", "--batch-size"), ("--width 6", "--width"),
        ("--micro-batches 3", "--micro-batches"), ("--nonsense", "--nonsense"), ("--widt 8", "--widt"),
        *[(f"--results {name}", "cannot write") for name in NO_FOLDER],
    ],
    "02_horovod/ring_allreduce.py": [
        ("", "one rank has nobody"), ("--sizes", "--sizes"), ("--nonsense", "--nonsense"), ("more", "more"),
        *[(f"{flag}={value}", flag) for flag in ("--sizes", "--repeats") for value in NUMBERS],
    ],
    "tools.measuring.bench": [("--sections 99", "--sections"), ("--sections many", "--sections"), ("--x", "--x")],
    "tools.measuring.cpus": [("--settings nonsense", "--settings"), ("--settings", "--settings"), ("more", "more")],
    "tools.measuring.lab": [
        *[(f"--list {flag}={value}", flag) for flag in ("--repeats", "--steps") for value in NUMBERS],
        ("--list --nonsense", "--nonsense"), ("--lis", "--lis")],
    "tools.measuring.profile_step": [
        ("", "main"), ("{}/none.py --results {}/new", "name a chapter's"), ("{} --results {}/new", "name a chapter's"),
        ("03_ddp/main.py", "--results"), *[(f"03_ddp/main.py --results {name}", "--results") for name in UNWRITABLE]],
    "tools.measuring.public_scripts": [("nonsense", "nonsense"), ("--timeout nan", "--timeout"), ("--verb", "--verb"),
                                       ("--timeout many", "--timeout")],
    "tools.measuring.reading": [*[(f"--images={value}", "--images") for value in (*NUMBERS, "7")], ("--x", "--x"),
                                ("--seed -1", "--seed")],
    "tools.measuring.slow_link": [
        ("--ways nonsense", "--ways"), ("--all-reduce 0", "--all-reduce"), ("--lr nan", "--lr"), ("--lr 0", "--lr"),
        *[(f"{flag}={value}", flag) for flag in ("--batch-size", "--steps", "--repeats") for value in NUMBERS],
        *[(f"--results {name}", "cannot write") for name in NO_FOLDER]],
    "tools.measuring.demo": [(name, "cannot write into") for name in ("{}/file", "/proc/nope", "{}/missing/folder")] + [
                             ("--nonsense", "--nonsense")],
    "tools.pages.docs": [("--only nonsense", "--only nonsense"), ("--onl 03_ddp", "--onl"), ("more", "more")],
}
BEGINS = {"tools/environment/setup.py": "set-up failed: ", "exercises/grade.py": r"(grade|none|broken|n+)\.py:? "}


@pytest.mark.fault
@pytest.mark.parametrize("program", OTHERS)
def test_wrong_flags_of_other_programs(program, tmp_path, files):
    rows = OTHERS[program]
    is_file = program.endswith(".py")
    name = program.rpartition("/")[2] if is_file else f"{program.rpartition('.')[2]}.py"
    wanted = [(filled(flags, files), {}, {}) for flags, _ in rows]
    words, cwd = (f"{ROOT}/{program}", files) if is_file else (program, ROOT)
    answers = in_turn(words, wanted, tmp_path, cwd, fork=False)
    taken = [(flags, answer) for (flags, said), answer in zip(rows, answers)
             if not refused(answer, said, BEGINS.get(program, f"{name}: "))]
    assert not taken, taken


@pytest.mark.fault
@pytest.mark.parametrize(("program", "flags"), [
    ("submit/agree.py", "--steps many"), ("submit/agree.py", f"--record /proc/nope {SCRIPT}"),
    ("submit/doctor.py", "--timeout nan"), ("reading_data/read_data.py", "--way sideways"),
    ("reading_data/read_data.py", "--way files --folder {}/file"), ("03_ddp/three_ways.py", "--results {}/none/file"),
    ("02_horovod/ring_allreduce.py", "--sizes 6"), ("02_horovod/ring_allreduce.py", "--sizes 4000000000000"),
    ("02_horovod/ring_allreduce.py", "--results {}/none/file")])
def test_one_rank_of_other_programs_speaks(program, flags, files):
    words = [BIN / "mpiexec", "-n", 2, sys.executable, ROOT / program, *filled(flags, files)]
    done = execute(words, cwd=files, timeout=60)
    assert refused((done.code, done.out, done.err), "", f"{Path(program).name}: "), done


LAB = ["", "nonsense", "up", "up many", "up 0", "up -1", "up 1.5", "up 99999", "up 33", "up 2 --rate",
       "up 2 --rate fast", "up 2 --rate 0", "up 2 --rate -1gbit", "up 2 --latency", "up 2 --latency 1",
       "up 2 --latency -1ms", "up 2 --nonsense", "run", "run true", "run -n", "run -n 0 true", "run -n many true",
       "run -n 2 --ppn 0 true", "run -n 2 true", "on", "on nid1", "on nid1 true", "rate", "rate 0", "rate 1gbit",
       "kill", "kill nid1", "status", "down"]


@pytest.mark.fault
def test_wrong_words_for_the_lab(files, tmp_path):
    """None is up here."""
    variables = {"TMPDIR": str(tmp_path), "LAB": f"bad{os.getpid()}"}
    for words in LAB:
        done = execute(["bash", ROOT / "submit" / "lab.sh", *words.split()], env=variables, cwd=files, timeout=30)
        assert refused((done.code, done.out, done.err), "", "lab.sh: ") and not done.out, (words, done)
    nowhere = execute(["bash", ROOT / "submit" / "lab.sh", "status"], env={"LAB_FOLDER": "/nowhere"}, timeout=30)
    assert refused((nowhere.code, nowhere.out, nowhere.err), "no lab is up", "lab.sh: "), nowhere
