"""Judges the reports of all ranks, and prints the table, the findings and the verdict."""

import sys
from collections import Counter
from functools import partial

from .gradients import judge_gradients
from .messages import CAUSES, SYMPTOMS, find_fix
from .ranks import UNSUPPORTED, Findings, Lines, all_steps_of, listed, pair_steps, plural, steps_of
from .samples import judge_data
from .sequence import judge_sequence
from .weights import judge_weights

NO_PROBLEMS, NOT_CHECKED = "no problems found", "not checked: see the note"
say = partial(print, file=sys.__stdout__)  # even if the script redirects sys.stdout


def judge(reports: list[dict], hang: tuple[Lines, Findings] = ()) -> tuple[Lines, Findings]:
    """Return the lines and findings of the reports of all ranks, in their order.

    hang: those of judge_hang(), if the ranks hang.
    """
    lines, findings, notes = [], {}, []
    if any(report["end"] == "waits" for report in reports):  # ranks at different places
        reports = [report | report["measured"] for report in reports]
    counts = [len(all_steps_of(report)) for report in reports]
    ends = [report["end"] for report, count in zip(reports, counts) if count == min(counts)]
    if len(set(counts)) > 1 and "ended" in ends:
        findings["steps"] = f"{listed(counts)} on ranks 0 to {len(counts) - 1}"
    unsupported = [wrapper for wrapper in reports[0]["wrappers"] if wrapper in UNSUPPORTED]
    if unsupported:
        note = f"{listed(unsupported)}: not compared; under DDP or FSDP2 a small model can be"
        return judge_devices(reports)[0], {"note": note}
    for judge_part in judge_weights, judge_gradients, judge_data, judge_devices:
        part_lines, part_findings = judge_part(reports)
        if "note" in part_findings:
            notes.append(part_findings.pop("note"))
        lines += part_lines
        findings |= part_findings
    findings = {key: details for key, details in findings.items() if key in SYMPTOMS}
    sequence = judge_sequence(reports)
    if "own gradients" in findings:
        explain_own_gradients(reports, findings, notes)
    elif sequence and (hang or findings.keys() & {"apart", "other gradients", "steps"}):
        findings["sequence"] = sequence
    elif sequence:
        notes.append(f"{sequence}: wrong if ranks skip batches or steps by a value of their own; "
                     "the weights are equal and so are the numbers of steps")
    if hang:
        lines = hang[0] + lines
        findings = hang[1] | findings if "sequence" not in findings else findings
    for name in sorted(intended_if_model_parallel(reports) & findings.keys()):
        notes.append(f"{name} ({findings.pop(name)}), which may be intended: each rank has a part "
                     "of the model")
    communicates = any(report[key] for report in reports
                       for key in ("process_group", "horovod", "wrappers"))
    if not communicates and findings.keys() & {"own gradients", "same data"}:
        findings["alone"] = "no process group of torch.distributed, no Horovod"
    notes += {f"not seen: {hook}, because of {problem}": None
              for report in reports for hook, problem in report["failed_hooks"].items()}
    shown = {key: details for key, details in findings.items()
             if not CAUSES.get(key, set()) & findings.keys()}
    if notes:
        shown["note"] = "; ".join(notes)
    return lines, shown


def judge_devices(reports):
    """Return the lines and findings of the ranks' devices."""
    findings = {}
    gpus = Counter(report["gpu"] for report in reports if report["gpu"])
    for gpu, ranks in gpus.items():
        if ranks > 1:
            findings["one GPU"] = f"{ranks} on {gpu}"
    return [("devices", listed(sorted({report["device"] for report in reports})))], findings


def explain_own_gradients(reports, findings, notes):
    """Replace the finding if the weights are equal all the same, because the ranks share them."""
    if findings.keys() & {"weights", "apart"}:
        return
    if "DDP" in reports[0]["wrappers"] and not reports[0]["comm_hook"]:
        findings["own gradients"] += "; something else makes the weights equal"
        return
    notes.append("each optimizer uses its rank's own gradients, and the weights are equal before "
                 "each step: right if the weights are averaged, wrong if one rank's are broadcast")
    del findings["own gradients"]


def intended_if_model_parallel(reports):
    """Return the findings that are not mistakes if each rank has a part of one model."""
    first = reports[0]
    data = {"same data", "overlap", "same noise"}
    if any(name.startswith("all_to_all") for name in first["calls"]):
        return data | {"weights", "apart", "part"}  # experts, or tables of embeddings
    return data if any(first["parts"].values()) and not first["wrappers"] else set()


def show(script: str, reports: list[dict], lines: Lines, findings: Findings) -> tuple[str, int]:
    """Print the table, a line per finding, and the verdict; return it and agree's exit code."""
    note = findings.pop("note", "")
    if all(reports):
        nodes = plural(len({report["host"] for report in reports}), "node")
        steps = plural(len({number for number, _ in pair_steps(reports)}), "step")
        later = len(all_steps_of(reports[0])) - len(steps_of(reports[0]))
        steps += f", {later:,} more without measuring" if later else ""
        wrappers = listed(reports[0]["wrappers"]) or "no known wrapper"
        tensors = {name for step in steps_of(reports[0]) for name in step["state"]}
        say(f"{script}: {plural(len(reports), 'rank')} on {nodes}, {steps}; {wrappers}; "
            f"{plural(len(tensors), 'tensor')}")
    for title, text in lines:
        say(f"  {title:30} {text}")
    if note:
        say(f"note: {note}")
    for key, details in findings.items():
        fix = find_fix(key, reports[0], details)
        say(f"WRONG: {key}: {SYMPTOMS[key]} ({details}). To do: {fix}")
    is_seen = not any(report["failed_hooks"] or set(report["wrappers"]) & set(UNSUPPORTED)
                      for report in reports if report)
    verdict, exit_code = f"verdict: wrong: {listed(sorted(findings))}", 1
    if not findings:
        verdict = f"verdict: {NO_PROBLEMS if is_seen else NOT_CHECKED}"
        exit_code = 0 if is_seen else 2
    say(verdict, flush=True)
    return verdict, exit_code
