"""The interactive part of docs/PLAN.md: docs/plan.html, docs/plan.js, and the planner's numbers.

docs/conf.py puts it into the site's page as one piece, which works without a server or a network.
"""

import json
import re
from dataclasses import asdict

from cluster.launch import ROOT
from cluster.plan import layouts, memory, step
from cluster.plan.transformer import PYTORCH, Transformer
from workshop.gpus import read_gpus

FIRST_GPU = "h100"
LLAMA = {"context": 8192, "vocabulary": 128_256, "kv_heads": 8, "gated": True}
MODELS = {
    "GPT, 32 layers": Transformer(32, 4096, 32, context=4096, vocabulary=32_000),
    "Llama 3.1 8B": Transformer(32, 4096, 32, ffn=14_336, **LLAMA),
    "Llama 3.1 70B": Transformer(80, 8192, 64, ffn=28_672, **LLAMA),
    "Llama 3.1 405B": Transformer(126, 16_384, 128, ffn=53_248, **LLAMA)}


def camel_case(name: str) -> str:
    return re.sub("_(.)", lambda match: match[1].upper(), name)


def with_camel_case(instance: object) -> dict:
    """Return a dataclass's fields, named as in JavaScript."""
    return {camel_case(name): value for name, value in asdict(instance).items()}


def planner() -> dict:
    """Return what plan.js calls PLANNER: all numbers that the Python has outside of functions."""
    return {
        "constants": with_camel_case(step.CENTRAL),
        "memoryConstants": {camel_case(name.lower()): getattr(memory, name) for name in (
            "LOGIT_BYTES", "RESERVED", "NVIDIA_SMI", "CONTEXT")},
        "memoryError": memory.MEMORY_ERROR, "batchTolerance": layouts.BATCH_TOLERANCE,
        "recomputed": step.RECOMPUTED,
        "gradientBytes": PYTORCH.gradient_bytes,
        "gpus": {name: with_camel_case(gpu) for name, gpu in read_gpus().items()},
        "models": {name: with_camel_case(model) for name, model in MODELS.items()}}


def page() -> str:
    """Return the HTML: the form, and its script."""
    form, script = ((ROOT / "docs" / name).read_text() for name in ("plan.html", "plan.js"))
    numbers = planner()
    for choice in "models", "gpus":
        options = "".join(f"<option{' selected' if name == FIRST_GPU else ''}>{name}</option>"
                          for name in numbers[choice])
        form = form.replace(f"<!-- {choice} -->", options)
    return f"{form}<script>\nconst PLANNER = {json.dumps(numbers)};\n{script}</script>\n"
