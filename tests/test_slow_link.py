"""Slow links: predictions by hand-computed cases, the words for contrary numbers, the plan, the loop that they time.

The records of tools/measuring/lab.py are made up here: it wants a lab and a machine without other work.
"""

import ast
import functools
import json
import math
import subprocess
from types import SimpleNamespace

import launch
import pytest
import records
import torch
import torch.distributed as dist
from conftest import ROOT
from matplotlib.backends.backend_agg import FigureCanvasAgg
from test_figures import words_shown
from tolerances import ARITHMETIC, COUNT, FP64, close

from tools.measuring import lab, lab_model, slow_link
from tools.measuring.lab_model import CENTRAL, Predictions, cost_model
from tools.pages import docs
from tools.pages import slow_link as page

PAGE = ROOT / "03_ddp" / "SLOW_LINK.md"


@pytest.fixture(autouse=True)
def slowest_is_computed_once(monkeypatch):
    monkeypatch.setattr(cost_model, "slowest", functools.cache(cost_model.slowest))


# --- made-up records ---

def alone(chapter="03_ddp", batch=64, at_once=2, step=0.1, **more):
    return {"chapter": chapter, "batch_size": batch, "at_once": at_once, "step_seconds": step, "kind": "alone"} | more


def together(chapter="03_ddp", batch=64, nodes=2, link="100mbit", step=0.6, **more):
    return {"chapter": chapter, "batch_size": batch, "nodes": nodes, "link": link, "step_seconds": step, "kind": "weak",
            "gradient_bytes": lab.BYTES[chapter], "image_size": 32, "global_batch_size": nodes * batch,
            "images_per_second": nodes * batch / step} | more


def made(slower=1.0, prediction="model", **factors):
    """Records of the whole plan: steps take `slower` times as long as predicted, ways so many times of that."""
    runs, found = lab.plan(), []
    for run in runs:
        stage = {} if run["stage"] is None else {"stage": run["stage"]}
        if run["kind"] == "ways":
            continue
        compute = run["batch"] / lab.batch_of(run["chapter"]) / 10
        if run["kind"] == "ways alone":
            found += [alone(way=way, program="slow_link.py", at_once=run["nodes"], batch=64 * images, step=0.1 * images,
                            times=[0.1, 0.101, 0.099, 0.1]) for way, images in (("plain", 1), ("batch", 4))]
        elif run["kind"] == "alone":
            found.append(alone(run["chapter"], run["batch"], run["nodes"], compute, **stage))
    bases = Predictions(found)
    for run in runs:
        stage = {} if run["stage"] is None else {"stage": run["stage"]}
        more = [(1, stage | {"kind": run["kind"]})]
        if run["kind"] == "ways":
            more = [(way.images, {"kind": "ways", "way": name, "program": "slow_link.py", "sent_bytes": 6.6e6})
                    for name, way in slow_link.WAYS.items()]
        for images, each in more if "alone" not in run["kind"] else ():
            record = together(run["chapter"], run["batch"] * images, run["nodes"], run["link"], **each)
            step = bases.seconds(record, prediction) * slower * factors.get(each.get("way"), 1)
            found.append(record | {"step_seconds": step, "images_per_second": record["global_batch_size"] / step})
    return [record | {"git": "1234567"} for record in found]


def reduced(share=0.9):
    """All-reduces over links that pass this share of their rate."""
    return [run | {"bytes": size, "repeat": 0, "git": "1234567",
                   "seconds": 1e-4 + 2 * (run["nodes"] - 1) / run["nodes"] * size
                   / (share * min(lab_model.rate_of(run["link"]), 1e9))}
            for run in lab.plan_of_all_reduces() for size in lab.SIZES]


# --- predictions ---

def test_the_rate_of_a_link():
    assert [lab_model.rate_of(link) for link in ("100mbit", "1gbit", "2.5gbit", "none")] == [12.5e6, 125e6, 312.5e6,
                                                                                         math.inf]


def test_a_step_without_overlap_is_computing_and_bytes_over_the_link():
    """Chapter 4 on two nodes: the late one computes, then 6.5 MB pass at 90 % of 12.5 MB/s; chapter 5 passes more."""
    late = 0.1 * (1 + CENTRAL.jitter / math.sqrt(math.pi))
    bases = [alone("04_deepspeed"), *(alone("05_zero", 1024, stage=stage) for stage in (1, 3))]
    predictions = Predictions(bases)
    step = predictions.seconds(together("04_deepspeed"))
    assert step == pytest.approx(late + 6505768 / (0.9 * 12.5e6), rel=ARITHMETIC * 10)  # hops take 6 us
    for stage, passed in ((1, 1.5), (3, 2)):
        step = predictions.seconds(together("05_zero", 1024, stage=stage))
        assert step == pytest.approx(late + passed * 2664232 / (0.9 * 12.5e6), rel=ARITHMETIC * 10)


def test_without_a_limit_nothing_passes_and_the_median_of_ranks_at_once_is_the_base():
    predictions = Predictions([alone(step=step) for step in (0.1, 0.2, 0.9)] + [alone(at_once=1, step=0.05)])
    late = 0.2 * (1 + CENTRAL.jitter / math.sqrt(math.pi))
    assert predictions.seconds(together(link="none")) == pytest.approx(late, rel=ARITHMETIC * 10)


def test_only_ranks_alone_are_looked_at():
    bases = [record for record in made() if record.get("at_once")]
    others = [record | {"step_seconds": 99.0} for record in made() if not record.get("at_once")]
    one, other = Predictions(bases), Predictions(bases + others)
    assert (one.base, one.jitter) == (other.base, other.jitter) and others


def test_the_bytes_are_the_chapters_and_come_when_their_layer_does():
    import_main = docs.ROOT / "03_ddp" / "main.py"
    build_model = next(part for part in ast.parse(import_main.read_text()).body
                       if isinstance(part, ast.FunctionDef) and part.name == "build_model")
    space = {"torch": torch, "nn": torch.nn}
    exec(compile(ast.Module([build_model], []), "main.py", "exec"), space)
    model = space["build_model"]("cnn", torch.zeros(1, 3, 32, 32))
    sizes = [4 * parameter.numel() for parameter in model.parameters()]
    found = [size for tensors, _ in lab_model.layers() for size in tensors]
    assert sorted(found) == sorted(sizes) and sum(sizes) == lab.BYTES["03_ddp"]
    products = [place for _, place in lab_model.layers()]
    assert products == [2 * 128 * 10, 2 * 12544 * 128, 2 * 288 * 64 * 784, 27 * 32 * 900]
    (first, early), (rest, end) = lab_model.ready("DDP")
    forward = sum(products) / 2 + products[-1] / 2
    assert early == pytest.approx((forward + sum(products[:2])) / (forward + sum(products))) and end == 1
    assert first + rest == sum(sizes) and first / sum(sizes) > 1 - 2 * COUNT
    assert lab_model.ready("DDP, one") == [(sum(sizes), 1.0)]
    assert [size for size, _ in lab_model.ready("Horovod")] == found


def test_what_is_sent_early_is_hidden():
    """Of 0.1 s computing 98.8 % of the bytes are ready after 0.04 s: at 1 Gbit/s backward hides them."""
    bases = [alone(), alone(way="plain", program="slow_link.py", times=[0.1] * 4)]
    predictions = Predictions(bases)
    assert predictions.jitter == {2: 0}
    hidden = predictions.seconds(together(link="1gbit"), "network")
    rest = lab_model.ready("DDP")[-1][0] / (0.9 * 125e6)
    assert hidden == pytest.approx(0.1 + rest, rel=ARITHMETIC * 10)
    assert predictions.seconds(together(link="1gbit")) > 0.1 + 4e6 / (0.9 * 125e6)  # the model hides a megabyte


def test_ways_are_predicted_from_their_own_batch():
    bases = [alone(way=way, program="slow_link.py", batch=64 * images, step=0.1 * images, times=[0.1 * images] * 4)
             for way, images in (("plain", 1), ("batch", 4))]
    predictions = Predictions(bases)
    for prediction in lab_model.PREDICTIONS:
        step = {name: predictions.seconds(together(batch=64 * way.images, way=name, program="slow_link.py"), prediction)
                for name, way in slow_link.WAYS.items()}
        assert step["accumulate"] == pytest.approx(step["plain"] + 0.3)
        assert step["fp16"] < step["plain"] - 0.2 < step["one"]
        assert step["plain"] <= step["one"] <= step["batch"]
    assert step["bucket"] == step["plain"]


def test_the_spread_of_steps_passes_over_what_is_late_once():
    times = [0.09, 0.1, 0.1, 0.1, 0.11] * 4
    assert lab_model.spread(times) == lab_model.spread([*times[:-1], 9.0])
    normal = torch.distributions.Normal(1.0, 0.25).icdf(torch.linspace(0, 1, 1001)[1:-1]).tolist()
    assert lab_model.spread(normal) == pytest.approx(0.25, rel=COUNT)


def test_the_predictions_are_those_that_were_committed_first():
    """Comments and layout apart."""
    name = "tools/measuring/lab_model.py"
    shown = subprocess.run(["git", "-C", ROOT, "show", f"{page.COMMIT}:{name}"], capture_output=True, text=True)
    if shown.returncode:
        pytest.skip("a shallow clone, or no repository: the history is not here")

    def code(text):
        tree = ast.parse(text)
        return ast.dump(ast.Module([part for part in tree.body if not isinstance(part, ast.Expr)
                                    or not isinstance(part.value, ast.Constant)], []))

    assert code(shown.stdout) == code((ROOT / name).read_text())


# --- the runs ---

def test_the_plan_has_every_run_once_and_each_its_base():
    runs = lab.plan()
    assert len({json.dumps(run) for run in runs}) == len(runs)
    bases = {(run["chapter"], run["stage"], run["batch"], run["nodes"]) for run in runs if run["kind"] == "alone"}
    for kind in "weak", "strong":
        found = {(run["chapter"], run["stage"], run["link"]) for run in runs
                 if run["kind"] == kind and run["nodes"] == 2}
        assert found == {(*chapter, link) for chapter in lab.CHAPTERS for link in lab.LINKS}
    assert all((run["chapter"], run["stage"], run["batch"], run["nodes"]) in bases
               for run in runs if run["kind"] in ("weak", "strong"))
    assert {run["batch"] * run["nodes"] for run in runs if run["kind"] == "strong"} == {64, 1024}
    assert {run["link"] for run in runs if run["kind"] == "ways"} == set(lab.SLOW)
    assert {run["nodes"] for run in runs if run["kind"] == "weak"} == {2, 4}
    for repeat in range(3):
        weak = [run for run in runs if run["kind"] == "weak" and run["nodes"] == 2 and run["repeat"] == repeat]
        assert len(weak) == 15
    assert 300 < lab.bound(runs) + lab.bound(lab.plan_of_all_reduces()) < 1200
    assert lab.listed(runs).count("100mbit") == sum(run["link"] == "100mbit" for run in runs)


def test_a_run_is_what_the_plan_says(monkeypatch, tmp_path):
    called = []

    def call(words, timeout=60):
        called.append(words)
        if "--results" in words:
            (docs.Path(words[-1])).write_text(json.dumps({"chapter": "05_zero", "memory": 1, "step_seconds": 1}) + "\n")

    monkeypatch.setattr(lab, "call", call)
    run = {"kind": "weak", "chapter": "05_zero", "stage": 3, "batch": 1024, "nodes": 2, "link": "1gbit", "repeat": 1}
    record, = lab.measure(5, **run)
    assert called[0][1:] == ["rate", "1gbit"] and called[1][1:4] == ["run", "-n", "2"]
    assert " ".join(called[1]).count("--stage 3") == 1 and "10" in called[1]
    assert record.items() >= {"kind": "weak", "repeat": 1, "link": "1gbit", "chapter": "05_zero"}.items()
    assert "memory" not in record and "git" in record


# --- the loop ---

ARGS = SimpleNamespace(dataset="digits", batch_size=16, precision="fp64", seed=3, lr=0.2, image_size=32)


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_loop_trains_as_main_py_does(group, tmp_path):
    """The same parameters after an epoch of digits, as its checkpoint has them."""
    saved = tmp_path / "saved.pt"
    launch.launch("03_ddp", 1, "--device", "cpu", "--batch-size", 16, "--seed", 3, "--precision",
                  "fp64", "--epochs", 1, "--checkpoint", saved)
    found = torch.nn.utils.parameters_to_vector(torch.load(saved)["model"].values())
    ours = slow_link.trained(slow_link.WAYS["plain"], ARGS, 0, 1, 1437 // 16)
    close("parameters, fp64", (ours - found).norm().item(), FP64)


def test_ways_that_only_pass_gradients_otherwise_train_the_same(group):
    plain, fp16, bucket, one, added, large = (
        slow_link.trained(slow_link.WAYS[name], ARGS, 0, 1, 5)
        for name in ("plain", "fp16", "bucket", "one", "accumulate", "batch"))
    for other in bucket, one:
        close("parameters, fp64", (plain - other).norm().item(), FP64)
    close("parameters, fp64", (added - large).norm().item(), FP64)
    moved = (plain - slow_link.trained(slow_link.WAYS["plain"], ARGS, 0, 1, 0)).norm()
    assert 0 < (plain - fp16).norm() < COUNT * moved < (plain - large).norm()


def test_a_rest_that_fills_no_step_waits_for_the_next_epoch(group):
    """1,437 images are 22 batches of 64: five steps of four batches; the sixth is of the second epoch."""
    args = SimpleNamespace(**vars(ARGS) | {"batch_size": 64})
    training = slow_link.Training(slow_link.WAYS["accumulate"], args, 0, 1)
    for _ in range(5):
        next(training.going)
    assert training.sampler.epoch == 0
    next(training.going)
    assert training.sampler.epoch == 1
    times, _ = training.timed(2)
    assert len(times) == 2 and min(times) > 0


# --- what the page says ---

def test_tables_and_figure_take_all_records(monkeypatch, tmp_path):
    for name, found in ("lab.jsonl", made(1.1)), ("lab_allreduce.jsonl", reduced()):
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in found))
    monkeypatch.setattr(records, "RECORDS", tmp_path)
    rendered = docs.render(PAGE.read_text())
    assert page.figure_line() in rendered
    assert docs.render(rendered) == rendered and len(docs.FENCE.sub("", rendered).splitlines()) <= 120
    rows = page.rows_of(tmp_path)
    assert len(rows) == 15 + 15 + 9 + 12 and all(row["model error"] == pytest.approx(0.1) for row in rows)
    title = page.draw().legends[0].get_title().get_text()
    assert title == "Slow links: 42 of 42 predictions for two nodes are within 15%"


def test_the_verdict_follows_the_numbers():
    good, slow = page.verdict(page.summary(made(1.1))), page.verdict(page.summary(made(2.0)))
    assert "meets its aim in all 42" in good and "promises too much nearly everywhere" in good
    assert "within 15% in 0 of 42" in slow and "the largest 100%" in slow
    fast = page.verdict(page.summary(made(0.5)))
    assert "promises too little nearly everywhere" in fast
    as_network = page.verdict(page.summary(made(1.0, "network")))
    assert "1 Gbit/s that makes the median error smaller, 0%" in as_network and "100 Mbit/s that changes" in as_network
    assert "makes the median error larger" in page.verdict(page.summary(made(1.0)))
    mixed = [row | {"model error": sign * 0.2, "network error": sign * 0.2}
             for row, sign in zip(page.summary(made()), [1, -1] * 99)]
    assert "errs to both sides" in page.verdict(mixed) and "changes little" in page.verdict(mixed)


def test_what_helps_follows_the_numbers():
    usual, odd = page.summary(made()), page.summary(made(plain=0.1))
    assert "At 100 Mbit/s the most images a second come with: a batch 4 times as large" in page.best_way(usual) or (
        "4 batches added up" in page.best_way(usual))
    assert page.best_way(odd).count("nothing that was tried is clearly faster") == 2
    assert "gradients travel as fp16" in page.best_way(page.summary(made(fp16=0.01)))
    slower = [row | {"measured": row["measured"] * (0.1 if row["name"] == "ZeRO 3" and row["link"] == "none" else 1)}
              for row in usual]
    assert "The slower the link" in page.stages(usual) and "not the link alone" in page.stages(slower)
    assert "Most are slower" in page.crowding(page.summary(made(1.2)))
    assert "Most are faster" in page.crowding(page.summary(made(0.8)))
    assert "were not run" in page.crowding([row for row in usual if row["nodes"] == 2])
    assert "wire is as the model has it" in page.on_the_wire(reduced())
    assert "is the wire's" in page.on_the_wire(reduced(0.5))
    assert page.times(1.04) == "as fast" and page.times(2) == "2.00 times as fast"


def test_the_figure_shows_all_kinds_of_runs_apart():
    figure = page.draw(made(1.3))
    shown = {text.get_text() for text in figure.legends[0].get_texts()}
    assert shown == {*page.NAMES.values(), "measured", "predicted"}
    hollow = [line for axis in figure.axes for line in axis.lines if line.get_markerfacecolor() == "white"]
    assert len(hollow) == 9 and all(round(line.get_xdata()[0]) == 4 for line in hollow)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    words = words_shown(figure, canvas.get_renderer())
    assert min(text.get_fontsize() for text, _ in words) >= page.style.TEXT
    for number, (text, box) in enumerate(words):
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, text
        assert not [other for other, place in words[:number] if box.overlaps(place)], text


def test_the_measured_page_names_what_it_promised():
    found = page.raw(records.RECORDS)
    missing = {(row["kind"], row["name"], row["link"]) for row in page.summary(made())} - {
        (row["kind"], row["name"], row["link"]) for row in page.summary(found)}
    assert not missing and all("link" in record for record in found)
    for row in page.summary(found):
        if row["sent"] is not None:  # headers take what is beside the formula
            part = 0.5 if row["way"] == "fp16" else 1
            assert row["sent"] == pytest.approx(part * lab.BYTES["03_ddp"], rel=2 * COUNT)
    assert cost_model.CENTRAL == CENTRAL
