"""Judges the reports of all ranks, and prints the table, the findings and the verdict."""

import sys
from functools import partial

from .gradients import judge_gradients
from .messages import CAUSES, SYMPTOMS, find_fix
from .ranks import UNSUPPORTED, Findings, Lines, all_steps_of, listed, pair_steps, plural, steps_of
from .samples import judge_data
from .sequence import judge_sequence
from .weights import judge_weights

say = partial(print, file=sys.__stdout__)  # even if the script redirects sys.stdout


Judgement = tuple[Lines, Findings]


def judge(reports: list[dict], hang: Judgement | None = None) -> Judgement:
    """Return the lines and findings of the reports of all ranks, in their order.

    hang: those of judge_hang(), if the ranks hang.
    """
    hang_lines, hang_findings = hang or ([], {})
    lines, findings, notes = [*hang_lines], {}, find_gaps(reports)
    devices = ("devices", listed(sorted({report["device"] for report in reports})))
    if why_not_compared(reports):
        return [*lines, devices], hang_findings | {"note": why_not_compared(reports)}
    if any(report["end"] == "waits" for report in reports):  # ranks at different places
        reports = [report | report["measured"] for report in reports]
    counts = [len(all_steps_of(report)) for report in reports]
    ends = [report["end"] for report, count in zip(reports, counts) if count == min(counts)]
    if len(set(counts)) > 1 and "ended" in ends:
        findings["steps"] = f"{listed(counts)} on ranks 0 to {len(counts) - 1}"
    for judge_part in judge_weights, judge_gradients, judge_data:
        part_lines, part_findings = judge_part(reports)
        if "note" in part_findings:
            notes.append(part_findings.pop("note"))
        lines += part_lines
        findings |= part_findings
    lines.append(devices)
    findings = {key: details for key, details in findings.items() if key in SYMPTOMS}
    sequence = judge_sequence(reports)
    may_share_weights = "DDP" not in reports[0]["wrappers"] or reports[0]["comm_hook"]
    if "own gradients" in findings:
        if may_share_weights and not findings.keys() & {"weights", "apart"}:
            del findings["own gradients"]
            notes.append("each optimizer uses its rank's own gradients, and the weights are equal "
                         "before each step: right if the weights are averaged, wrong if one rank's "
                         "are broadcast")
    elif sequence and (hang or findings.keys() & {"apart", "other gradients", "steps"}):
        findings["sequence"] = sequence
    elif sequence:
        notes.append(f"{sequence}: wrong if ranks skip batches or steps by a value of their own; "
                     "the weights are equal and so are the numbers of steps")
    if "sequence" not in findings:
        findings = hang_findings | findings
    communicates = any(report[key] for report in reports
                       for key in ("process_group", "horovod", "wrappers"))
    if not communicates and findings.keys() & {"own gradients", "same data"}:
        findings["alone"] = "no process group of torch.distributed, no Horovod"
    shown = {key: details for key, details in findings.items()
             if not CAUSES.get(key, set()) & findings.keys()}
    if notes:
        shown["note"] = "; ".join(notes)
    return lines, shown


def why_not_compared(reports: list[dict]) -> str:
    """Return why agree cannot judge these ranks, or ""."""
    first = reports[0]
    for wrapper in first["wrappers"]:
        if wrapper in first["unavailable"]:
            return f"{wrapper}: not compared; {first['unavailable'][wrapper]}"
    unsupported = [wrapper for wrapper in first["wrappers"] if wrapper in UNSUPPORTED]
    if unsupported:
        return f"{listed(unsupported)}: not compared; under DDP or FSDP2 a small model can be"
    if any(name.startswith("all_to_all") for name in first["calls"]):
        return "all_to_all: not compared; each rank may have a part of one model, such as experts"
    alone = next((report["alone"] for report in reports if report["alone"]), "")
    if alone:
        return f"not compared: between two collectives {alone}; take out what a rank trains alone"
    return ""


def find_gaps(reports: list[dict]) -> list[str]:
    """Return what agree could not see, as texts."""
    first = reports[0]
    gaps = [f"{findings}: not available; {problem}"
            for findings, problem in first["unavailable"].items() if findings != "FSDP2"]
    failures = [f"not seen: {hook}, because of {problem}" for report in reports
                for hook, problem in report["failed_hooks"].items()]
    return [*gaps, *dict.fromkeys(failures)]


def show(script: str, reports: list[dict], lines: Lines, findings: Findings) -> int:
    """Print the table, a line per finding, and the verdict; return agree's exit code."""
    note = findings.pop("note", "")
    if all(reports):
        nodes = plural(len({report["host"] for report in reports}), "node")
        steps = plural(len({number for number, _ in pair_steps(reports)}), "step")
        later = len(all_steps_of(reports[0])) - len(steps_of(reports[0]))
        steps += f", {later:,} more without measuring" if later else ""
        wrappers = listed(reports[0]["wrappers"]) or "no known wrapper called"
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
    verdict, exit_code = f"wrong: {listed(sorted(findings))}", 1
    if not findings and (why_not_compared(reports) or find_gaps(reports)):
        verdict, exit_code = "not checked: see the note", 2
    elif not findings:
        verdict, exit_code = "no problems found", 0
    say(f"verdict: {verdict}", flush=True)
    return exit_code
