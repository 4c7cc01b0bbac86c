"""What the judging functions share: steps of all ranks, groups of ranks, and words."""

from collections import Counter
from collections.abc import Iterable

UNSUPPORTED = ("FSDP1", "DeepSpeed", "tensor parallelism")  # whose ranks agree cannot compare

Findings = dict[str, str]  # {name of a finding, or "note": details}
Lines = list[tuple[str, str]]  # rows of the table: (what was compared, the result)


def listed(values: Iterable) -> str:
    return ", ".join(map(str, values))


def plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'s' * (count != 1)}"


def add_note(findings: Findings, text: str) -> None:
    if text not in findings.setdefault("note", text):
        findings["note"] += f"; {text}"


def steps_of(report: dict) -> list[dict]:
    """Return the measured steps."""
    return [event for event in report["events"] if event["kind"] == "step" and "state" in event]


def all_steps_of(report: dict) -> list[dict]:
    return [event for event in report["events"] if event["kind"] == "step"]


def events_before(report: dict, step: dict) -> list[dict]:
    """Return a rank's events since the step before this one, of any optimizer."""
    end = next(i for i, event in enumerate(report["events"]) if event is step)
    starts = [i + 1 for i, event in enumerate(report["events"][:end]) if event["kind"] == "step"]
    return report["events"][max(starts, default=0):end]


def pair_steps(reports: list[dict]) -> list[tuple[int, list[dict]]]:
    """Return (step number, [the step on each rank]) for the steps that all ranks have taken.

    Step k of an optimizer is compared with step k of the same optimizer on other ranks.
    """
    ranks = []
    for report in reports:
        steps, counts = {}, Counter()
        for step in steps_of(report):
            optimizer, = step["what"]
            counts[optimizer] += 1
            steps[optimizer, counts[optimizer]] = step
        ranks.append(steps)
    keys = [key for key in ranks[0] if all(key in steps for steps in ranks)]
    return [(number, [steps[optimizer, number] for steps in ranks]) for optimizer, number in keys]


def samples_before(report: dict, step: dict) -> list[list[str]]:
    """Return the samples that the last called model got before each backward pass of a step."""
    samples, forwards = [], []
    for event in events_before(report, step):
        if event["kind"] == "forward":
            forwards.append(event)
        elif event["kind"] in ("backward", "grad") and forwards:
            samples.append([sample for forward in forwards for sample in forward["samples"]
                            if forward["what"] == forwards[-1]["what"]])
            forwards = []
    return list(filter(None, samples))
