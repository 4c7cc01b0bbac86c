"""Judges what the ranks do one after the other: do they do the same?"""

from .ranks import Findings, Lines, listed

VERBS = {"draw": "draws a batch", "backward": "calls backward()", "step": "takes a step of {}"}


def judge_sequence(reports: list[dict]) -> str:
    """Return where the ranks begin to do different things: draws, backward passes and steps.

    A wrapper that averages in backward() then pairs different batches. What comes before the first
    step does not count, nor what a rank draws where another never does: an evaluation on rank 0.
    """
    if not set(reports[0]["wrappers"]) & {"DDP", "FSDP2", "Horovod"}:
        return ""
    shared = set.intersection(*({event["what"][0] for event in report["events"]
                                 if event["kind"] == "draw"} for report in reports))
    ranks = [[event for event in report["events"] if event["kind"] in ("backward", "step")
              or (event["kind"] == "draw" and event["what"][0] in shared)]
             for report in reports]
    kinds = [[event["kind"] for event in events] for events in ranks]
    if not all("step" in rank for rank in kinds):
        return ""
    steps = 0
    for events in zip(*(events[rank.index("step"):] for events, rank in zip(ranks, kinds))):
        if len({(event["kind"], *map(str, event["what"])) for event in events}) > 1:
            actions = [VERBS[event["kind"]].format(*event["what"]) for event in events]
            places = [f"{action} at {event['place']}" for action, event in zip(actions, events)]
            return f"after step {steps}, {describe_ranks(places)}"
        steps += events[0]["kind"] == "step"
    return ""


def judge_hang(states: list[tuple[dict, dict]], seconds: float) -> tuple[Lines, Findings]:
    """Return the table lines and findings for ranks that hang.

    states: (report or None, last published status or None) of each rank.
    """
    lines, calls = [], []
    for rank, (report, status) in enumerate(states):
        stack = status["stack"] if status else ["the start"]
        calls.append("" if report or not status else status["call"])
        lines.append((f"rank {rank}", "at the end" if report else f"at {' < '.join(stack)}"))
    places = [f"waits in {call}, {states[rank][1]['stack'][0]}" if call else
              f"is {lines[rank][1].split(' < ')[0]}" for rank, call in enumerate(calls)]
    ended = [rank for rank, (report, _) in enumerate(states) if report and report["end"] == "ended"]
    if ended and "DDP's backward" in calls:
        return lines, {"steps": describe_ranks(places)}
    if len(set(calls)) > 1 and not set(calls) <= {"", "barrier"}:
        return lines, {"sequence": describe_ranks(places)}
    return lines, {"hang": f"for {seconds:.0f} s, at the lines above"}


def judge_calls(calls: list[list]) -> Findings:
    """Return the finding of ranks whose next calls, (call, place, ...), differ."""
    return {"sequence": describe_ranks([f"calls {call} at {place}" for call, place, *_ in calls])}


def describe_ranks(actions: list[str]) -> str:
    """Return what each rank does, as text; ranks that do the same are together."""
    ranks = {}
    for rank, action in enumerate(actions):
        ranks.setdefault(action, []).append(rank)
    return "; ".join(f"rank {listed(numbers)} {action}" for action, numbers in ranks.items())
