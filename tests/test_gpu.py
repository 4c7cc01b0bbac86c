"""`make gpu` on the CPU, which GPUs NCCL takes for one, and --profile."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, assert_refused, read_records, run, run_command

from workshop.devices import identify_gpu

WHOLE = {"pci_domain_id": 0, "pci_bus_id": 7, "pci_device_id": 0, "uuid": "a"}
OTHER = WHOLE | {"pci_bus_id": 8, "uuid": "b"}


@pytest.mark.check
@pytest.mark.parametrize(("first", "second", "has_host_ids", "are_one"), [
    (WHOLE, WHOLE, False, True),
    (WHOLE, OTHER, False, False),
    (WHOLE, WHOLE | {"uuid": "b"}, False, True),  # two slices (MIG)
    ({"uuid": "a"}, {"uuid": "b"}, False, False),  # an older PyTorch
    (WHOLE, WHOLE, True, False)])
def test_two_ranks_gpus_are_one_if_nccl_takes_them_for_one(
        first, second, has_host_ids, are_one, monkeypatch):
    texts = []
    for rank, properties in enumerate((first, second)):
        if has_host_ids:
            monkeypatch.setenv("NCCL_HOSTID", f"node of rank {rank}")
        gpu = SimpleNamespace(**properties)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, gpu=gpu: gpu)
        texts.append(identify_gpu(torch.device("cuda", 0)))
    assert (texts[0] == texts[1]) == are_one, texts


def test_a_profile_has_three_steps(tmp_path):
    flags = ["--profile", tmp_path / "trace.json"]
    result = run("03_ddp", 2, "--epochs", 1, *flags)
    assert result.code == 0 and not result.err, result.err
    trace = json.loads((tmp_path / "trace.json").read_text())
    names = {event["name"] for event in trace["traceEvents"]}
    assert {"ProfilerStep#5", "ProfilerStep#6", "ProfilerStep#7", "gloo:all_reduce"} <= names
    assert_refused(run("01_single_node", 1, "--max-steps", 7, *flags), "8 steps or more")


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_all_parts_run_on_the_cpu(tmp_path):
    results = tmp_path / "gpu.jsonl"
    result = run_command([sys.executable, ROOT / "tests" / "gpu", "--device", "cpu",
                          "--results", results], timeout=1500)
    assert result.code == 0, result.out + result.err
    parts = {record["part"] for record in read_records(results)}
    assert parts == {"ddp", "fsdp", "bf16", "deepspeed", "failures", "agreement", "speed",
                     "predictions"}
    assert "passed: False" not in result.out
