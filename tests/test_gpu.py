"""cluster/gpu.py on the CPU, and --profile."""

import json
import sys

import pytest
from conftest import assert_refused, read_records, run, run_command


def test_a_profile_has_three_steps(tmp_path):
    flags = ["--profile", tmp_path / "trace.json"]
    result = run("03_ddp", 2, "--epochs", 1, *flags)
    assert result.code == 0 and not result.err, result.err
    trace = json.loads((tmp_path / "trace.json").read_text())
    names = {event["name"] for event in trace["traceEvents"]}
    assert {"ProfilerStep#5", "ProfilerStep#6", "ProfilerStep#7", "gloo:all_reduce"} <= names
    assert_refused(run("01_single_node", 1, "--max-steps", 7, *flags), "8 steps or more")


@pytest.mark.slow
def test_all_parts_run_on_the_cpu(tmp_path):
    results = tmp_path / "gpu.jsonl"
    result = run_command([sys.executable, "-m", "cluster.gpu", "--device", "cpu",
                          "--results", results], timeout=900)
    assert result.code == 0, result.out + result.err
    parts = {record["part"] for record in read_records(results)}
    assert parts == {"doctor", "same", "speed", "scaling"}
    assert "passed: False" not in result.out and "bf16, channels last" in result.out
