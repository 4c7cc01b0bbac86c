"""The page "What will it take?" in a browser: its JavaScript says what the Python says."""

import html
import json
import random
import re
import shutil
import subprocess
from dataclasses import asdict

import pytest

from cluster.plan import layouts
from cluster.plan.step import make_cluster
from cluster.plan.transformer import Layout, Transformer
from tools.pages import plan
from workshop.gpus import read_gpus

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
in_chromium = pytest.mark.skipif(not CHROMIUM, reason="no chromium here: apt install chromium")
pytestmark = pytest.mark.timeout(180)

RANK = """
JSON.stringify(INPUTS.map(([sizes, gpu, gpus, perNode, nodeLink, sequences]) => {
  const cluster = makeCluster(gpus, perNode, nodeLink, PLANNER.gpus[gpu].gpuLink);
  const plans = rank(transformer(sizes), PLANNER.gpus[gpu], cluster, sequences);
  return plans.map(plan => ({kind: plan.kind, layout: plan.layout, step: plan.step,
    memory: plan.memory, fits: plan.fits, speed: plan.tokensPerSecond, mfu: plan.mfu,
    limit: limit(plan)}));
}))"""
CHANGE = """
JSON.stringify(CHANGES.map(fields => {
  for (const [name, value] of Object.entries(fields)) {
    const input = inputs[name] ?? document.querySelector(`[data-field=${name.slice(7)}]`);
    input.value = value;
    input.dispatchEvent(new Event("input", {bubbles: true}));
  }
  return [element("best").innerText, element("layouts").innerText.replace(/\\s+/g, " ")];
}))"""


def open_page(folder, expression, **variables):
    """Return the value of a JavaScript expression on the page, whose last part is JSON."""
    start = "".join(f"const {name} = {json.dumps(value)};\n" for name, value in variables.items())
    path = folder / "page.html"
    path.write_text(f'<!doctype html><meta charset="utf-8">{plan.page()}<script>{start}'
                    f"const value = eval({json.dumps(expression)});\n"
                    "document.body.textContent = value;</script>")
    result = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/user",
         "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=120)
    body = re.search("<body>(.*)</body>", result.stdout, re.S)
    assert body, result.stderr
    return json.loads(html.unescape(body[1]))


def random_input(numbers: random.Random) -> tuple:
    """Return a model, a GPU's name, GPUs, GPUs per node, bytes/s of a node's link, sequences."""
    heads = numbers.choice([6, 8, 12, 16, 32, 40, 64, 128])
    model = Transformer(
        numbers.randint(2, 128), heads * numbers.choice([64, 80, 128]), heads,
        2 ** numbers.randint(9, 15), numbers.randint(1_000, 200_000),
        numbers.choice([0, heads // 2, 1 if heads < 8 else 8, heads]),
        numbers.choice([0, 0, numbers.randint(1_000, 60_000)]),
        numbers.random() < 0.5, numbers.random() < 0.5)
    gpus = numbers.choice([2 ** numbers.randint(0, 12), numbers.randint(1, 600)])
    batch = 2 ** numbers.uniform(17, 25)
    return (model, numbers.choice(list(read_gpus())), gpus, numbers.choice([1, 2, 4, 6, 8, 16]),
            25e9 * 2 ** numbers.uniform(-4, 5), max(1, round(batch / model.context)))


def ranked(model, gpu, gpus, per_node, node_link, sequences):
    """Return the Python's plans in the form of RANK's."""
    gpu = read_gpus()[gpu]
    cluster = make_cluster(gpus, per_node, node_link, gpu.gpu_link)
    plans = layouts.rank(model, gpu, cluster, sequences)
    return [{"kind": one.kind, "layout": plan.with_camel_case(one.layout),
             "step": plan.with_camel_case(one.step),
             "memory": asdict(one.memory) | {
                 "reserved": one.memory.reserved, "inUse": one.memory.in_use}, "fits": one.fits,
             "speed": one.tokens_per_second, "mfu": one.mfu, "limit": one.limit} for one in plans]


@in_chromium
def test_javascript_and_python_rank_200_random_inputs_alike(tmp_path):
    numbers = random.Random(0)
    inputs = [random_input(numbers) for _ in range(200)]
    expected = [ranked(*values) for values in inputs]
    pages = open_page(tmp_path, RANK, INPUTS=[
        [plan.with_camel_case(model), *others] for model, *others in inputs])
    kinds = {one["kind"] for plans in expected for one in plans}
    limits = {one["limit"] for plans in expected for one in plans}
    assert len(kinds) >= 6 and len(limits) == 5  # the inputs reach all of them
    for values, python, page in zip(inputs, expected, pages, strict=True):
        assert len(python) == len(page), values
        for one, other in zip(python, page):
            other["layout"] = plan.with_camel_case(Layout()) | other["layout"]
            assert other["step"].pop("optimizer") >= 0
            for name, value in one.items():
                if name in ("step", "memory", "speed", "mfu"):
                    value = pytest.approx(value, rel=1e-9, abs=0)
                assert other[name] == value, values


@in_chromium
def test_the_form_shows_the_python_plans_or_one_line(tmp_path):
    llama, *refused, last = open_page(tmp_path, CHANGE, CHANGES=[
        {"model": "Llama 3.1 70B", "gpu": "a100", "slider-gpus": 8, "batch": 2**22},
        {"heads": 60}, {"heads": 64, "kvHeads": 5}, {"kvHeads": "", "layers": ""},
        {"layers": 80, "gpus": 96, "batch": 8192 * 4}, {"batch": 2**22, "gpu": "v100", "gpus": 1}])
    usual, model = read_gpus()["a100"], plan.MODELS["Llama 3.1 70B"]
    expected = ranked(model, "a100", 256, usual.gpus_per_node, usual.node_link,
                      2**22 / model.context)
    best, rows = llama
    assert best.startswith(f"Recommended, the fastest that fits: {expected[0]['kind']}. "), best
    assert f"{model.parameters / 1e9:.1f} billion parameters on 256 GPUs" in best
    for row in expected:
        fits = {"yes": "fits", "perhaps": "may not fit", "no": "does not fit"}[row["fits"]]
        assert re.search(rf"{re.escape(row['kind'])}: [\d.,]+ of [\d.]+ GiB, {fits};[^;]+%, "
                         f"limited by {row['limit']}", rows), row
    for (message, rows), words in zip(refused, (
            "heads: must divide the width, 8192", "heads of K and V: must divide the heads",
            "layers: .+", "4 sequences do not divide among 96 GPUs"), strict=True):
        assert re.fullmatch(words, message) and rows == "", message
    assert last[0].startswith("None fits; the smallest: ")
