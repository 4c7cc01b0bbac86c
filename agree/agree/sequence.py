"""Judges what the ranks do one after the other: do they do the same?"""

from collections import Counter

from .ranks import Findings, Lines, listed

VERBS = {"draw": "draws a batch", "backward": "calls backward()", "step": "takes a step of {}"}


def judge_sequence(reports: list[dict]) -> Findings:
    """Return where the ranks begin to do different things: draws, backward passes and steps.

    This is a mistake if a wrapper averages in backward(), since it then pairs different batches. A
    single draw, such as rank 0's for a figure, does not count, nor does a loader from which some
    ranks never draw, because others send them their batches.
    """
    if not set(reports[0]["wrappers"]) & {"DDP", "FSDP2", "DeepSpeed", "Horovod"}:
        return {}
    draws = [Counter(tuple(event["what"]) for event in report["events"] if event["kind"] == "draw")
             for report in reports]
    repeated = {what for what in set.intersection(*map(set, draws))
                if any(counts[what] > 1 for counts in draws)}
    ranks = [[event for event in report["events"] if event["kind"] in ("backward", "step")
              or (event["kind"] == "draw" and tuple(event["what"]) in repeated)]
             for report in reports]
    steps = 0
    for events in zip(*ranks):
        if len({(event["kind"], *map(str, event["what"])) for event in events}) > 1:
            actions = [VERBS[event["kind"]].format(*event["what"]) for event in events]
            places = [f"rank {rank} {actions[rank]} at {event['place']}"
                      for rank, event in enumerate(events)]
            return {"sequence": f"after step {steps}, {'; '.join(places)}"}
        steps += events[0]["kind"] == "step"
    return {}


def judge_hang(states: list[tuple[dict, dict]], seconds: float) -> tuple[Lines, Findings]:
    """Return the table lines and findings for ranks that hang.

    states: (report or None, last published status or None) of each rank.
    """
    lines, calls = [], []
    for rank, (report, status) in enumerate(states):
        stack = status["stack"] if status else ["the start"]
        calls.append("" if report or not status else status["call"])
        lines.append((f"rank {rank}", "at the end" if report else f"at {' < '.join(stack)}"))
    waiting = [f"rank {rank} waits in {call}, {states[rank][1]['stack'][0]}"
               for rank, call in enumerate(calls) if call]
    ended = [rank for rank, (report, _) in enumerate(states) if report and report["end"] == "ended"]
    if ended and "DDP's backward" in calls:
        return lines, {"steps": f"rank {listed(ended)} has ended; {listed(waiting)}"}
    if len(set(calls)) > 1 and not set(calls) <= {"", "barrier"}:
        return lines, {"sequence": f"{listed(waiting)}; the others are not there"}
    return lines, {"hang": f"for {seconds:.0f} s, at the lines above"}


def judge_calls(calls: list[list[str]]) -> tuple[Lines, Findings]:
    """Return the table lines and findings for ranks whose next calls, (call, place), differ."""
    lines = [(f"rank {rank}", f"{call}, at {place}") for rank, (call, place) in enumerate(calls)]
    return lines, {"sequence": listed(sorted({call for call, _ in calls}))}
