"""The lab of scaling.ipynb and submit/LAB.md: words against made-up runs, what a training prints, that no lab stays."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time

import nbformat
import pytest
from conftest import BIN, ROOT, execute

from tools.measuring import lab_live
from tools.notebooks import lab

TRAINING = """\
digits: 1,437 images, cnn: 125,000 parameters, fp32, cpu
ranks: 2, nodes: 2, batch: 32 a rank, 64 global, learning rate: 0.05, steps: 0 of 88 done, 22 an epoch
epoch 1/4: loss 2.0287, accuracy 0.4382, 6,400 images/s
epoch 2/4: loss 0.5916, accuracy 0.8352, 6,400 images/s
epoch 3/4: loss 0.1827, accuracy 0.9439, 987 images/s
epoch 4/4: loss 0.0765, accuracy 0.9751, 1,600 images/s
test accuracy 0.9694 (349 of 360 images)
""".splitlines()


@pytest.fixture(autouse=True)
def path(monkeypatch):
    """As the notebook's first cell sets it."""
    monkeypatch.setenv("PATH", f"{BIN}{os.pathsep}{os.environ['PATH']}")


def run(before, after):
    """A run whose epochs take a second each, with one that the turn is in; a step sends 500,000 bytes."""
    speeds = [*before, 1.0, *after]
    return {"rates": ["1gbit", "100mbit"], "turned": [len(before) + 0.1, len(before) + 0.2], "ranks": 2, "nodes": 2,
            "parameters": 125_000, "global_batch_size": 64,
            "epochs": [[end, speed] for end, speed in enumerate(speeds, 1)]}


def test_what_the_training_prints_is_read():
    assert list(map(lab.read, TRAINING)) == [{"parameters": 125_000}, {"ranks": 2, "nodes": 2, "global_batch_size": 64},
                                             6400, 6400, 987, 1600, None]
    assert lab.read("") is lab.read("main.py: no epoch 1/4 and no 100 images/s") is None


def test_the_epoch_of_the_turn_is_in_neither_half():
    assert lab.halves(run([5, 6], [3, 4])) == ([5, 6], [3, 4])
    assert lab.halves({"epochs": [[1, 5]]}) == ([5], [])


def test_the_prediction_is_that_by_hand():
    """64 images in 10 ms; 4,000,000 bits take 4 ms, then 40 ms."""
    found = run([6400] * 3, [1600])
    assert lab.sent(found) == 500_000
    assert lab.predicted(found) == pytest.approx(64 / 0.046)
    assert lab.sent(found | {"ranks": 4}) == 750_000
    assert [lab.bits(rate) for rate in ("1gbit", "2.5mbit", "8kbit")] == [1e9, 2.5e6, 8e3]
    assert [lab.spoken(rate) for rate in ("1gbit", "2.5mbit", "8kbit")] == ["1 Gbit/s", "2.5 Mbit/s", "8 kbit/s"]


def test_the_sentence_follows_its_numbers():
    said = lab.on_turned(run([6400] * 3, [1600, 1500, 1700]))
    assert "500,000 bytes: 4.0 ms at 1 Gbit/s, 40.0 ms at 100 Mbit/s" in said
    assert "took 10.0 ms, so 46.0 ms are predicted, 0.22 times" in said
    assert "6,400, then 1,600 images/s, **0.25 times**; the prediction is 13% below that" in said
    assert said.endswith("Every epoch before was faster than every one after.")
    assert "the prediction is 39% above that" in lab.on_turned(run([6400] * 3, [1000]))
    assert "They fell, but the halves overlap" in lab.on_turned(run([6400, 6400, 1000], [1600]))
    for same in ([6400], [9000]):
        assert "They did not fall" in lab.on_turned(run([6400] * 3, same))


def test_the_figure_has_what_there_is_yet():
    whole = run([6400] * 3, [1600] * 3)
    stages = [{"rates": whole["rates"], "epochs": []},
              {name: whole[name] for name in whole if name != "turned"} | {"epochs": whole["epochs"][:3]},
              whole | {"epochs": whole["epochs"][:3]}, whole]
    found = []
    for stage in stages:
        figure = lab.draw_turned(stage)
        axis, = figure.axes
        found.append((len(axis.lines[0].get_xdata()), len(axis.lines), [text.get_text() for text in axis.texts]))
        assert lab.quickly(figure).data.startswith(b"\x89PNG")
    assert found == [(0, 1, ["1 Gbit/s"]), (3, 1, ["1 Gbit/s"]), (3, 3, ["1 Gbit/s", "100 Mbit/s"]),
                     (7, 3, ["1 Gbit/s", "100 Mbit/s"])]


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Puts a script of one's own in lab.sh's place, which notes the words that it is called with; returns where."""
    def replace(body):
        (tmp_path / "lab.sh").write_text(f'echo "$LAB $*" >>{tmp_path}/calls\n{body}\n')
        (tmp_path / "printed").write_text("\n".join(TRAINING) + "\n")
        monkeypatch.setattr(lab, "LAB", tmp_path / "lab.sh")
        return tmp_path / "calls"

    return replace


@pytest.fixture
def shown(monkeypatch):
    """What is displayed, and displayed anew in its place."""
    pictures = []

    class Handle:
        update = pictures.append

    def display(picture, display_id):
        assert display_id
        pictures.append(picture)
        return Handle

    monkeypatch.setattr(lab, "display", display)
    return pictures


def called(calls):
    """The words of each call; all of one lab, which is this process's own."""
    names, words = zip(*(line.split(" ", 1) for line in calls.read_text().splitlines()))
    assert set(names) == {f"live-{os.getpid()}"}
    return list(words)


PRINT = 'if [ "$1" = run ]; then while read -r line; do echo "$line"; sleep 0.2; done <"${0%lab.sh}printed"; fi'


def test_the_link_is_turned_after_the_epoch_that_was_asked_for(script, shown, monkeypatch, capsys):
    calls = script(PRINT)
    monkeypatch.setenv("LAB_FOLDER", "/somebody/else's")
    found = lab.turned_down("1gbit", "100mbit", after=2, epochs=4)
    assert called(calls) == ["up 2 --rate 1gbit", "run -n 2 python 03_ddp/main.py --global-batch-size 64 --epochs 4",
                             "rate 100mbit", "down"]
    before, after = lab.halves(found)
    assert (before, after) == ([6400, 6400], [1600]) and found["turned"][0] >= found["epochs"][1][0]
    assert len(shown) >= 3, "drawn before, meanwhile, and at the end"
    assert capsys.readouterr().out.splitlines() == [f"submit/lab.sh {words}" for words in called(calls)[:-1]]


FAILURES = {  # what lab.sh does: what the notebook says of it
    'if [ "$1" = up ]; then echo "lab.sh: no tc here: apt install iproute2" >&2; exit 2; fi':
        "no tc here: apt install iproute2",
    'if [ "$1" = up ]; then exit 1; fi': "`submit/lab.sh up` failed",
    'if [ "$1" = run ]; then echo "main.py: no digits"; exit 2; fi': "the training failed: main.py: no digits",
    'if [ "$1" = run ]; then sleep 100 & wait; fi': "the training printed nothing for 1 s",
    'if [ "$1" = up ]; then sleep 100 & wait; fi': "`submit/lab.sh up` did not end in 1 s",
    f'{PRINT.replace("0.2", "0")}; if [ "$1" = rate ]; then echo "lab.sh: the lab has died" >&2; exit 2; fi':
        "the lab has died",
    PRINT.replace('line"; sleep', '{line/epoch/}"; sleep'): "too few epochs were printed"}


@pytest.mark.parametrize("body", FAILURES, ids=FAILURES.values())
def test_where_there_is_no_lab_the_recorded_run_is_shown(body, script, shown, monkeypatch, capsys):
    """One line says why; whatever came up is taken down."""
    calls = script(body)
    monkeypatch.setattr(lab, "WAIT", 1)
    found = lab.turned_down("1gbit", "100mbit", after=2, epochs=4)
    assert found == lab.recorded() and called(calls)[-1] == "down"
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith(f"No lab here: {FAILURES[body]}") and said.endswith(found["processor"] + ".")
    assert shown[-1].axes[0].lines[0].get_ydata().tolist() == [speed for _, speed in found["epochs"]]


def test_the_kernel_may_be_interrupted(script, tmp_path):
    """The interrupt goes to all processes of the kernel's group, as Jupyter's does."""
    calls = script('if [ "$1" = run ]; then echo begun >>"${0%lab.sh}begun"; sleep 100; fi; '
                   'if [ "$1" = down ]; then sleep 0.5; echo gone >>"${0%lab.sh}calls"; fi')
    program = ("import sys; from pathlib import Path; from tools.notebooks import lab; lab.LAB = Path(sys.argv[1]); "
               "lab.trained('1gbit', '100mbit', 2, 4, print)")
    process = subprocess.Popen([sys.executable, "-c", program, tmp_path / "lab.sh"], cwd=ROOT, start_new_session=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "begun").exists() and process.poll() is None:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    assert "KeyboardInterrupt" in process.communicate(timeout=60)[1]
    assert [line.split()[-1] for line in calls.read_text().splitlines()[-2:]] == ["down", "gone"]


@pytest.mark.parametrize(("there", "said"), [([], "no ip here: apt install iproute2"),
                                             (["ip"], "no tc here: apt install iproute2")])
def test_what_the_lab_says_of_a_missing_program_is_passed_on(there, said, tmp_path, monkeypatch):
    text = (ROOT / "submit" / "lab.sh").read_text()
    (tmp_path / "lab.sh").write_text(text.replace('PATH="$PATH:/usr/sbin:/sbin"\n', ""))
    for name in "bash", "dirname", "uname", *there:
        (tmp_path / name).symlink_to(shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin"))
    monkeypatch.setattr(lab, "LAB", tmp_path / "lab.sh")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(lab.NoLab, match=said):
        lab.call("up", 2)


def test_the_record_is_of_the_run_that_the_notebook_makes():
    notebook = nbformat.read(ROOT / "03_ddp" / "scaling.ipynb", as_version=4)
    words = '"{first}", "{then}", after={after}, epochs={epochs}'.format(**lab_live.RUN)
    assert [cell for cell in notebook.cells if f"lab.turned_down({words})" in cell.source]
    found = lab.recorded()
    assert found["rates"] == [lab_live.RUN["first"], lab_live.RUN["then"]]
    assert len(found["epochs"]) == lab_live.RUN["epochs"] and found["ranks"] == found["nodes"] == 2


@pytest.fixture
def a_lab_can_come_up():
    try:
        with lab.nodes(1, "1gbit"):
            pass
    except lab.NoLab as problem:
        pytest.skip(str(problem))


def test_two_nodes_train_while_the_link_is_turned_down(a_lab_can_come_up):
    """No more bytes pass than the link's rate lets, and what a bucket of 32 kB lets pass at once in each step."""
    found = lab.trained("1gbit", "20mbit", after=2, epochs=5, watch=lambda _: None)
    assert found["ranks"] == found["nodes"] == 2 and found["parameters"] == 53_002
    slowest = (lab.sent(found) - 32 * 1024) * 8 / 20e6
    assert max(lab.halves(found)[1]) <= 64 / slowest
    done = execute(lab.command("status"), env=lab.environment())
    assert done.code == 2 and "no lab is up" in done.err


PAGE = (ROOT / "submit" / "LAB.md").read_text()
SCRIPT = (ROOT / "submit" / "lab.sh").read_text()


def beginnings(message):
    """The first three words of each part of a message of lab.sh that is the same whenever it is said."""
    parts = (re.sub("[:,]", "", part).split() for part in re.split(r"\$\([^)]*\)|\$\{[^}]*\}|\$\w+", message))
    return [" ".join(words[:1 if words[0] == "usage" else 3]) for words in parts if words]


def test_the_page_s_table_has_every_message_of_the_lab():
    messages = [message for message in re.findall(r'\bfail "([^"]+)"', SCRIPT) if not message.startswith("up NODES")]
    table = PAGE.partition("## What goes wrong")[2].partition("\n## ")[0]
    symptoms = re.sub("[:,]", "", "\n".join(line.split(" | ")[0] for line in table.splitlines()))
    assert len(messages) > 20
    assert [message for message in messages if not any(words in symptoms for words in beginnings(message))] == []


def test_the_page_s_five_commands_print_what_stands_there(a_lab_can_come_up):
    """But for the lab's name, and the images/s."""
    commands, printed = PAGE.split("```")[1:4:2]
    done = execute(["bash", "-ec", commands.replace(". .venv/bin/activate\n", "")], cwd=ROOT, env=lab.environment())
    assert done.code == 0 and not done.err

    def same(text):
        return re.sub(r"[\d,]+ images/s|^lab \S+:", "", text.strip(), flags=re.M)

    assert same(done.out) == same(printed)
