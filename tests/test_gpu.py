"""submit/gpu.py on the CPU, and --profile."""

import json
import sys

import pytest
from conftest import ROOT, execute, lines, run

GPU = [sys.executable, ROOT / "submit" / "gpu.py"]


def test_a_profile_has_three_steps(tmp_path):
    done = run("01_single_node", 1, "--epochs", 1, "--profile", tmp_path / "trace.json")
    assert done.code == 0 and not done.err, done.err
    trace = json.loads((tmp_path / "trace.json").read_text())
    names = {event["name"] for event in trace["traceEvents"]}
    assert {"ProfilerStep#5", "ProfilerStep#6", "ProfilerStep#7"} <= names


@pytest.mark.slow
def test_all_parts_on_the_cpu(tmp_path):
    done = execute([*GPU, "--device", "cpu", "--results", tmp_path / "gpu.jsonl"], timeout=900)
    assert done.code == 0, done.out + done.err
    records = lines(tmp_path / "gpu.jsonl")
    parts = {record["part"] for record in records}
    assert parts == {"doctor", "same", "ladder", "scaling", "failures"}
    assert "passed: False" not in done.out and "bf16, channels last" in done.out


def test_a_wrong_part_is_named():
    done = execute([*GPU, "leiter"])
    assert done.code == 2 and "unknown part leiter: choose from doctor," in done.err
