"""What the notebooks compute and draw is what another computation gives."""

import json
import os
import sys
from itertools import product

import pytest
from conftest import BIN, ROOT, execute
from tolerances import ARITHMETIC, ONE_DECIMAL

from tools.notebooks import memory, parallelism


@pytest.mark.slow
def test_batch_size_trains_as_main_py_does(tmp_path):
    """After the first epoch, in separate processes: both have a main.py to import."""
    flags = ["--device", "cpu", "--epochs", "1", "--seed", "3", "--results", str(tmp_path / "record")]
    done = execute([sys.executable, "main.py", *flags], env={"OMP_NUM_THREADS": "1"}, cwd=ROOT / "01_single_node")
    assert done.code == 0, done.err
    program = ("from tools.measuring.steps_to_target import training; "
               "print(next(accuracy for step, loss, accuracy in training(64, rate=0.05, seed=3) if step == 22))")
    found = execute([sys.executable, "-c", program], env={"OMP_NUM_THREADS": "1"}, cwd=ROOT)
    assert found.code == 0, found.err
    assert float(found.out) == json.loads((tmp_path / "record").read_text())["test_accuracy"]


@pytest.mark.slow
def test_a_run_of_three_ways_sends_what_the_formulae_say(monkeypatch):
    monkeypatch.setenv("PATH", f"{BIN}{os.pathsep}{os.environ['PATH']}")
    records = parallelism.run("mpiexec -n 2 python three_ways.py --batch-size 256 --width 64").records
    for way in parallelism.NAMES:
        expected = parallelism.sent(way, 256, 1, 64, 4, 2)
        assert [parallelism.last_step(rank) for rank in parallelism.of(records, way)] == [expected] * 2


@pytest.mark.check
@pytest.mark.parametrize("schedule", parallelism.SCHEDULES)
def test_a_timetable_is_possible_and_its_bubble_is_the_formula(schedule):
    for stages, micro_batches in product((2, 4, 8), (1, 2, 4, 8, 32)):
        orders = [parallelism.order(schedule, stage, stages, micro_batches) for stage in range(stages)]
        table = parallelism.slots(orders)
        assert len(table) == 2 * stages * micro_batches
        assert len({(stage, slot) for (stage, *_), slot in table.items()}) == len(table)  # one thing at a time
        for (stage, kind, number), slot in table.items():
            before = stage - 1 if kind == "forward" else stage + 1
            assert table.get((before, kind, number), -1) < slot  # what is needed has been received
            assert kind == "forward" or table[stage, "forward", number] < slot
        assert parallelism.idle(table, stages) == pytest.approx((stages - 1) / (micro_batches + stages - 1))
        kept = [micro_batches if schedule == "GPipe" else min(micro_batches, stages - stage) for stage in range(stages)]
        assert [parallelism.in_flight(events) for events in orders] == kept


@pytest.mark.check
def test_model_state_is_the_paper_s():
    for ranks in (1, 2, 64):
        paper = [16, 4 + 12 / ranks, 2 + 14 / ranks, 16 / ranks]
        found = [memory.total(memory.state(stage, ranks)) for stage in range(4)]
        assert found == pytest.approx(paper, rel=ARITHMETIC)
    figure = [memory.total(memory.state(stage, 64, 7.5e9)) / 1e9 for stage in range(4)]
    assert figure == pytest.approx([120, 31.4, 16.6, 1.9], abs=ONE_DECIMAL)


@pytest.mark.check
@pytest.mark.parametrize("way", memory.WAYS)
def test_what_autograd_keeps_is_what_is_derived(way):
    assert memory.counted_activations(32, 3, way) == memory.expected_activations(32, 3, way)
