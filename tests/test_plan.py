"""cluster/plan: layouts, their memory and speed, and how wrong the model is."""

import json
import math
import re
import runpy
import sys
from collections import defaultdict
from dataclasses import replace

import pandas
import pytest
from tolerances import ARITHMETIC, assert_close

from cluster.plan import by_footprint, check, layouts, measured, step
from cluster.plan.memory import rank_memory
from cluster.plan.transformer import Layout, Transformer
from workshop.gpus import read_gpus

pytestmark = pytest.mark.check
GPT = "--layers 32 --width 4096 --heads 32 --context 4096 --vocabulary 32000"
RUN = {"ranks": 1, "nodes": 1, "device": "cuda",
       "global_batch_size": 64, "images": 6400, "step_seconds": 0.2, "gradient_bytes": 100e6}
FITTED_CONSTANTS = "attention", "other_bytes", "score_bytes", "exposed", "ring_hop"


@pytest.fixture
def plan(monkeypatch, capsys):
    """Return a function (*flags) -> (exit code, stdout, stderr) of cluster.plan, run here."""
    def run_plan(*flags):
        words = [word for flag in flags for word in str(flag).split()]
        monkeypatch.setattr(sys, "argv", ["plan", *words])
        code = 0
        try:
            runpy.run_module("cluster.plan", run_name="__main__")
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()
    return run_plan


@pytest.fixture(scope="module")
def runs():
    return check.read_runs()[0]


@pytest.fixture(scope="module")
def speeds(runs):
    return check.speed_errors(runs)


def median_error(ratios):
    return (ratios - 1).abs().median()


def test_speed_is_as_near_to_published_runs_as_the_pages_say(speeds):
    assert len(speeds) == 206
    assert median_error(speeds.ratio) < 0.10 and median_error(speeds["median"]) > 0.20
    assert median_error(speeds[~speeds.source.isin(check.FITTED)].ratio) < 0.13
    for source, rows in speeds.groupby("source"):
        assert len(rows) < 20 or median_error(rows.ratio) < 0.20, source


def test_no_run_that_was_out_of_memory_is_called_safe(runs):
    table = check.memory_errors(runs)
    verdicts = [layouts.fits(row.memory, row.gpu, layouts.MEMORY_ERROR)
                for row in table[table.out_of_memory].itertuples()]
    assert len(verdicts) == 7 and "yes" not in verdicts
    judges = table[~table.source.isin(check.FITTED)]
    assert (1 / judges.ratio).quantile(0.9) < 1 + layouts.MEMORY_ERROR  # as its comment says
    assert median_error(table.ratio) < 0.10


def fitting_loss(runs, constants, shares):
    """Return the sum of the fitted sources' mean errors, the largest ones cut off."""
    errors = defaultdict(list)
    for run in runs:
        if run.tokens_per_second and run.source in check.FITTED:
            gpu = replace(run.gpu, matmul_share=shares[run.gpu.name[0]])
            ratio = replace(run, gpu=gpu).predict(constants) / run.tokens_per_second
            errors[run.source].append(min(abs(math.log(ratio)), 0.3))
    return sum(sum(values) / len(values) for values in errors.values())


def test_the_constants_are_the_fit_that_their_comments_name(runs):
    gpus = read_gpus()
    shares = {"a": gpus["a100"].matmul_share, "h": gpus["h100"].matmul_share}
    best = fitting_loss(runs, step.CENTRAL, shares)
    for factor in 0.9, 1.1:
        for name in FITTED_CONSTANTS:
            changed = replace(step.CENTRAL, **{name: getattr(step.CENTRAL, name) * factor})
            assert fitting_loss(runs, changed, shares) > 0.995 * best, name
        for name, share in shares.items():
            assert fitting_loss(runs, step.CENTRAL, shares | {name: share * factor}) > best


def test_a_layout_by_hand():
    """FSDP on 16 GPUs of two nodes, by the inequalities of chapter 3."""
    model = Transformer(layers=4, width=64, heads=4, context=128, vocabulary=1000)
    gpu = replace(read_gpus()["h100"], peak=1e12, matmul_share=0.5)
    cluster = step.Cluster(2, 8, node_link=4e6, gpu_link=1e12)
    layout = Layout(data=16, micro_batch=2, micro_batches=3)
    constants = replace(step.CENTRAL, other_bytes=0, ring_hop=0, exposed=0)
    result = step.transformer_step(model, layout, gpu, cluster, constants=constants)
    parameters = 4 * 12 * 64**2 + 2 * 1000 * 64
    link = 8 * parameters * 15 / 16 / (4e6 * step.CENTRAL.share)
    optimizer = 24 * parameters / 16 / gpu.memory_rate
    assert_close("FSDP by its link", abs(result.seconds / (3 * link + optimizer) - 1), ARITHMETIC)
    flops = 3 * 2 * (4 * 12 * 64**2 + 1000 * 64)
    attention = 3.5 * 2 * 4 * 64 * 128 / step.CENTRAL.attention
    compute = 3 * 2 * 128 * (flops + attention) / 0.5e12
    assert_close("compute", abs(result.compute / compute - 1), ARITHMETIC)
    memory = rank_memory(model, layout)
    assert memory.state > 16 * parameters / 16
    assert memory.activations == 2 * 128 * 34 * 64 * 4


def test_a_pipeline_by_hand():
    """16 stages of 30 blocks: the second has two of them, and keeps 15 micro-batches."""
    model = Transformer(layers=30, width=128, heads=1, context=64, vocabulary=1000)
    layout = Layout(data=4, tensor=2, pipeline=16, zero=1, micro_batch=2, micro_batches=20)
    memory, block = rank_memory(model, layout), 12 * 128**2
    assert memory.state == 2 * block / 2 * (2 + 6 + 12 / 4)
    assert memory.activations == 2 * 15 * 2 * 64 * (34 * 128 / 2 + 2 * 128)
    gpu = read_gpus()["h100"]
    nodes = step.Cluster(16, 8, node_link=8e3, gpu_link=1e12)  # a stage is a node
    sent = 2 * 2 * 64 * 128 * 2 / 2  # activations and gradients of a micro-batch, of a GPU
    free = replace(step.CENTRAL, share=math.inf, ring_hop=0)  # tensors cost nothing
    seconds = step.transformer_step(model, layout, gpu, nodes, constants=free).tensor
    assert seconds == pytest.approx(20 * sent / (8e3 / 8 * step.CENTRAL.usable))
    layout, one_node = Layout(pipeline=8, zero=1), step.Cluster(1, 8, 8e3, gpu_link=1e12)
    assert step.transformer_step(model, layout, gpu, one_node).tensor < 1e-3  # no network


def test_more_ranks_and_slower_links_never_help():
    model = Transformer(32, 4096, 32, 4096, 32000)
    gpu = read_gpus()["a100"]
    for kind, layout in layouts.layouts(model, 64, 8, 256):
        fast, slow = (step.transformer_step(model, layout, gpu, step.make_cluster(
            64, 8, link, 300e9)) for link in (200e9, 20e9))
        assert fast.seconds <= slow.seconds and layout.gpus == 64, kind


def test_the_three_commands_print_a_plan(plan, tmp_path):
    footprint = {"script": "x.py", "ranks": 8, "memory": dict.fromkeys(
        ("parameters", "gradients", "master copy", "optimizer state", "activations"), 1e9)
        | {"peak": 6e9}, "flops": {"forward": 1e15, "backward": 2e15},
        "sent": [{"operation": "all-gather", "dimension": "", "ranks": 8, "calls": 9,
                  "bytes": 7e9, "link": "inside a node"}]}
    for name, record in ("footprint", footprint), ("run", RUN):
        (tmp_path / name).write_text(json.dumps(record))
    gpu = "--gpu a100-40 --gpus 8 64"
    _, out, _ = plan(GPT, gpu, "--global-batch-tokens 1M --tokens 100B")
    assert "recommended: DP8 ZeRO-1 TP2 PP4; limited by compute: " in out
    assert "runner-up: FSDP64: " in out and "DDP64: memory: 125 GiB of state" in out
    _, out, _ = plan("--footprint", tmp_path / "footprint", gpu)
    rows = [line.split() for line in out.splitlines()[2:4]]
    assert [row[:3] for row in rows] == [["8", "2", "yes"], ["64", "16", "scaled"]]
    assert float(rows[0][3]) - float(rows[1][3]) == pytest.approx(  # GiB: a shard of 4e9 bytes
        (4e9 - 0.5e9) / 2**30 * 1.05 * 1.15, abs=0.1)
    assert float(rows[1][5]) == pytest.approx(7 * (63 / 64) / (7 / 8), rel=0.01)  # GB sent
    _, out, _ = plan("--footprint", tmp_path / "footprint", gpu, "--speed 0.5")
    assert float(out.splitlines()[2].split()[6]) == pytest.approx(2 * float(rows[0][6]), rel=0.01)
    _, out, _ = plan("--measured", tmp_path / "run", gpu, "--markdown")
    assert out.startswith("| nodes | GPUs | global batch |")


def test_a_file_of_other_runs_is_checked(plan, tmp_path):
    table = pandas.read_csv(check.PUBLISHED, dtype=str, keep_default_na=False)
    row = table[table.tokens_per_s_per_gpu != ""].iloc[0].to_dict()
    rows = [row | change for change in (
        {}, {"layout": "HSDP8"}, {"layout": "DP2 TP2 PP2, distributed optimizer, SP"},
        {"vocabulary": "", "heads": ""}, {"checkpointing": "selective"},
        {"gpu": "Trainium"}, {"layout": "EP8 DP8"}, {"layout": "pure magic"}, {"gpus": ""},
        {"checkpointing": "unheard of"}, {"precision": "fp32"}, {"parameters_billion": "47"},
        {"layout": "TP3"})]
    pandas.DataFrame(rows).to_csv(tmp_path / "runs.csv", index=False)
    code, out, _ = plan("--check", tmp_path / "runs.csv")
    assert code == 0 and "13 rows, 5 with a speed" in out
    assert out.count("not predicted: 1 row(s)") == 8


def scaling_table(plan, tmp_path, records, *flags):
    """Return the printed rows of --measured by their number of GPUs."""
    path = tmp_path / "run.jsonl"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    code, out, _ = plan("--measured", path, "--markdown", *flags)
    assert code == 0
    names, _, *rows = [line.strip("| ").split(" | ") for line in out.splitlines()]
    table = [dict(zip(names, (float(cell.strip("%").replace(",", "")) for cell in row)))
             for row in rows]
    return {row["GPUs"]: row for row in table}


def test_predictions_for_one_gpu_and_a_slow_link(plan, tmp_path):
    """One GPU is as fast as measured; two nodes are no faster than the link allows."""
    rows = scaling_table(plan, tmp_path, [RUN], "--gpus", 1, 2, 512, "--gpus-per-node", 1,
                         "--node-link", 10e6, "--epochs", 9)
    assert rows[1]["samples/s"] == 320 and rows[1]["hours"] == 0.05
    assert rows[2]["samples/s"] < 128 / (100e6 / 10e6)
    assert rows[2]["pessimist"] <= rows[2]["efficiency"] <= rows[2]["optimist"]
    assert [row["global batch"] for row in rows.values()] == [64, 128, 12 * 512]  # the data set


def test_strong_scaling_uses_the_records_of_smaller_batches(plan, tmp_path):
    smaller_run = RUN | {"global_batch_size": 32, "step_seconds": 0.19}
    flags = ("--gpus-per-node", 2, "--node-link", 1e12, "--gpus", 2, 4, "--largest-batch", 128)
    rows = scaling_table(plan, tmp_path, [smaller_run, RUN], *flags)
    assert [row["global batch"] for row in rows.values()] == [128, 128]
    assert rows[4]["speed-up"] < 2.2  # half the batch takes as long
    assert rows[4]["efficiency"] <= rows[4]["computing"] < 55  # so it is not the network's fault
    rows = scaling_table(plan, tmp_path, [RUN], *flags)  # no smaller batch known
    assert rows[4]["speed-up"] > 3.5


def test_a_link_is_fitted_to_the_doctors_all_reduces():
    cluster = step.Cluster(4, 2, node_link=3e9, gpu_link=1e12, measured=True)
    records = [{"all_reduce": "NCCL", "bytes": size, "ranks": 8, "nodes": 4,
                "seconds": step.all_reduce_seconds(size, cluster)}
               for size in (0, 2**20, 2**24, 2**28)]
    link, level = measured.measured_link(records)
    assert_close("a measured link", abs(link / 3e9 - 1), ARITHMETIC)
    assert_close("a measured level", abs(level / step.CENTRAL.level - 1), ARITHMETIC)


@pytest.mark.fault
@pytest.mark.parametrize(("change", "message"), [
    ("--gpus 0", "--gpus: .*at least 1"), ("--gpu t4", "--gpu: .*a100"),
    ("--gpus 12", "--gpus 12: not whole nodes of 8"), ("--heads 7", "--heads 7: it has to divide"),
    ("--kv-heads 5", "--kv-heads"), ("--global-batch-tokens 1k", "below one sequence"),
    ("--tokens 1k", "below one step"), ("--global-batch-tokens many", "number above 0, such as 1M"),
    ("--speed 0", "--speed: .*above 0"),
    ("--gpus 4096 --global-batch-tokens 8k", "4096 GPUs: no layout"),
    ("--measured nowhere", "give one of"), ("--site nowhere", "--site nowhere: ")])
def test_bad_input_gets_one_line(plan, change, message):
    good = "--gpu h100 --gpus 64 --global-batch-tokens 1M --tokens 100B"
    assert_one_line(plan(GPT, good, change), message)


def assert_one_line(result, message):
    code, out, err = result
    assert code == 2 and re.fullmatch(rf"cluster\.plan: .*{message}.*\n", err), (out, err)


@pytest.mark.fault
@pytest.mark.parametrize(("change", "message"), [
    ({"gradient_bytes": None}, "a line of JSON with nodes, ranks, "),
    ({"step_seconds": "0.2"}, "a line of JSON with nodes, ranks, "),
    ({"images": None}, "--samples N: ")])
def test_an_incomplete_record_gets_one_line(plan, change, message, tmp_path):
    (tmp_path / "run.jsonl").write_text(json.dumps(RUN | change))
    flags = "--node-link 1e9 --gpus 4 --measured", tmp_path / "run.jsonl"
    assert_one_line(plan(*flags), message)


def test_hsdp_keeps_its_shards_on_more_gpus():
    sent = [{"operation": operation, "ranks": 8, "bytes": 7e9, "link": link} for operation, link in
            (("all-gather", "inside a node"), ("all-reduce", "between nodes"))]
    memory = dict.fromkeys((*by_footprint.SHARDED, "activations", "peak"), 1e9)
    footprint = {"ranks": 64, "memory": memory, "flops": {"forward": 1e15}, "sent": sent}
    gpu = read_gpus()["h100"]
    rows = [by_footprint.plan_footprint([footprint], gpu, gpus, 8, 400e9, 450e9, 0.7)
            for gpus in (64, 512)]
    assert rows[0].memory == rows[1].memory
    assert rows[1].sent == pytest.approx(7e9 + 7e9 * (63 / 64) / (7 / 8))


@pytest.mark.fault
@pytest.mark.parametrize(("text", "message"), [
    ("a\n1,2\n1,2,3\n", "not in the form of"), ("gpu,gpus\nH100,8\n", "no column checkpointing"),
    ("", "not in the form of")])
def test_a_table_of_another_form_gets_one_line(plan, text, message, tmp_path):
    (tmp_path / "runs.csv").write_text(text)
    assert_one_line(plan("--check", tmp_path / "runs.csv"), message)


@pytest.mark.fault
@pytest.mark.parametrize("flag", ["--check", "--footprint", "--measured", "--links"])
def test_a_missing_file_gets_one_line(plan, flag):
    assert_one_line(plan(f"{flag} nowhere" + " --check" * (flag == "--links")), "nowhere: no such")


def test_the_links_of_a_site(plan):
    _, out, _ = plan(GPT, "--gpu a100-40 --gpus 8 --site polaris --global-batch-tokens 1M")
    assert "3.06 per node" in out
