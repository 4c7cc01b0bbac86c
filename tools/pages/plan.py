"""The interactive part of docs/PLAN.md: docs/plan.html, docs/plan.js, and the planner's numbers.

docs/conf.py puts it into the site's page as one piece, which works without a server or a network.
"""

import json
import re
from dataclasses import asdict

import pandas

from cluster.launch import ROOT
from cluster.plan import check, layouts, memory, step
from cluster.plan.transformer import PYTORCH, Transformer
from workshop.gpus import read_gpus

OUR_GPT = Transformer(layers=32, width=4096, heads=32, context=4096, vocabulary=32_000)
FIRST_GPU = "h100"
PUBLISHED_MODELS = ("Llama 3.1 8B", "Llama 3.1 70B", "Llama 3.1 405B")


def camel_case(name: str) -> str:
    return re.sub("_(.)", lambda match: match[1].upper(), name)


def with_camel_case(instance: object) -> dict:
    """Return a dataclass's fields, named as in JavaScript."""
    return {camel_case(name): value for name, value in asdict(instance).items()}


def planner() -> dict:
    """Return what plan.js calls PLANNER: all numbers that the Python has outside of functions."""
    runs = pandas.read_csv(check.PUBLISHED, dtype=str, keep_default_na=False)
    first_runs = runs.drop_duplicates("model").set_index("model", drop=False)
    models = {"GPT, 32 layers": OUR_GPT} | {
        name: check.read_model(first_runs.loc[name]) for name in PUBLISHED_MODELS}
    return {
        "constants": with_camel_case(step.CENTRAL),
        "memoryConstants": {camel_case(name.lower()): getattr(memory, name) for name in (
            "LOGIT_BYTES", "RESERVED", "NVIDIA_SMI", "CONTEXT")},
        "memoryError": layouts.MEMORY_ERROR, "batchTolerance": layouts.BATCH_TOLERANCE,
        "kinds": layouts.KINDS, "recomputed": step.RECOMPUTED,
        "gradientBytes": PYTORCH.gradient_bytes,
        "gpus": {name: with_camel_case(gpu) for name, gpu in read_gpus().items()},
        "models": {name: with_camel_case(model) for name, model in models.items()}}


def page() -> str:
    """Return the HTML: the form, and its script."""
    form, script = ((ROOT / "docs" / name).read_text() for name in ("plan.html", "plan.js"))
    numbers = planner()
    for choice in "models", "gpus":
        options = "".join(f"<option{' selected' if name == FIRST_GPU else ''}>{name}</option>"
                          for name in numbers[choice])
        form = form.replace(f"<!-- {choice} -->", options)
    return f"{form}<script>\nconst PLANNER = {json.dumps(numbers)};\n{script}</script>\n"
