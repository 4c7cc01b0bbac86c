"""Checks for exercise 4: a training that a killed rank and a signal interrupt."""

import io
import os
import random
import signal
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from runner import NotRun
from scripts import run_with_torchrun, same_tensors
from torch.optim.optimizer import register_optimizer_step_post_hook

EPOCH_STEPS, STEPS, SAVE_STEPS = 29, 4 * 29, 10
SAVES = 6  # job 1 ends in the last of them


def run(file, folder, ranks, kill_at_save=None, signal_at_step=None):
    """Run the script in `folder`. Return what each rank did, a problem, and when the event was.

    kill_at_save: the rank that saves is killed when it has written half of the n-th file;
    signal_at_step: rank 1 gets SIGTERM after n steps. The third value is the number of steps made
    before that, or None.
    """
    event = folder / "event"
    event.unlink(missing_ok=True)

    def prepare():
        os.chdir(folder)
        counts = {"steps": 0, "saves": 0}
        write_file = torch.save

        def after_step(*_):
            counts["steps"] += 1
            if counts["steps"] == signal_at_step and dist.get_rank() == 1:
                send(signal.SIGTERM)

        def save(content, target, **options):
            write_file(content, target, **options)
            if isinstance(target, io.BytesIO):  # pickle's
                return
            counts["saves"] += 1
            if counts["saves"] == kill_at_save:
                path = target.name if hasattr(target, "write") else target
                os.truncate(path, os.path.getsize(path) // 2)
                send(signal.SIGKILL)

        def send(number):
            event.write_text(str(counts["steps"]))
            os.kill(os.getpid(), number)

        register_optimizer_step_post_hook(after_step)
        torch.save = save
        return counts

    try:
        results, problem = run_with_torchrun(file, ranks, prepare), ""
    except NotRun as not_run:
        results, problem = [], str(not_run)
    return results, problem, int(event.read_text()) if event.exists() else None


def checks(file):
    """Compare three jobs, one after another, with a training that nothing interrupts."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as jobs:
        results, problem, _ = run(file, Path(folder), 2)
        steps = steps_of(results)
        yield f"2 ranks that nothing interrupts train {STEPS} steps", len(steps) == STEPS, (
            problem or f"they train {len(steps)}: do not change the training")
        yield from check_jobs(file, Path(jobs), results[0], steps)


def check_jobs(file, folder, whole, steps):
    _, problem, killed = run(file, folder, 2, kill_at_save=SAVES)
    yield f"job 1, 2 ranks: one is killed in its {SAVES}th save", killed is not None, (
        problem or f"torch.save(state, file), which this grader watches, was not called {SAVES} "
        f"times: no signal announces a lost node, so save after every {SAVE_STEPS} steps, too")

    delay = random.randrange(39, 46)  # into epoch 4
    results, problem, signalled = run(file, folder, 3, signal_at_step=delay)
    yield "job 2, 3 ranks, goes on", not problem or signalled, (
        f"{problem}. Every rank has to load the checkpoint, and to begin at the same step. Does it "
        "read a half-written file? Write another file, then rename it with os.replace, which "
        "replaces the old file at once")
    yield f"  after {delay} steps rank 1 gets SIGTERM: all ranks end", not problem, (
        f"{problem}. Only rank 1 got SIGTERM: its handler should set a variable, and nothing else. "
        "After each step an all-reduce of this variable tells all ranks whether to save and end")
    begin = yield from check_position(results, whole, steps, killed - SAVE_STEPS, killed - 1)
    end = begin + results[0]["steps"]
    yield f"  they end within {SAVE_STEPS} steps", end <= begin + delay + SAVE_STEPS, (
        f"they train to step {end}: after SIGTERM, which only rank 1 got, all leave main()")
    yield "  they leave no digits.pt", not (folder / "digits.pt").exists(), (
        "the job script takes this file for the end of training: leave main() before it is saved")
    savers = [rank for rank, result in enumerate(results) if result["saves"]]
    yield "  one rank saves, with torch.save", len(savers) == 1, (
        f"ranks {savers} save; expected one: ranks that write the same file at the same time may "
        "corrupt it")

    results, problem, _ = run(file, folder, 1)
    yield "job 3, 1 rank, goes on", not problem, problem
    yield from check_position(results, whole, steps, end, end)
    yield "  it ends with the parameters of the training that nothing has interrupted", (
        same_tensors(results[0]["end"], whole["end"])), (
        "something else changes in training: save it")


def check_position(results, whole, steps, lowest, highest):
    """Check how a job begins. Return how many steps were made before.

    whole: what a rank of the training that nothing interrupts did; steps: its images.
    """
    job_steps = steps_of(results)
    begin = next((number for number, images in enumerate(steps) if job_steps[:1] == [images]), None)
    if begin is None:
        hint = ("its first images are those of no step: every rank has to load the same position, "
                "and takes BATCH // world_size images")
    elif begin == 0:
        hint = ("it begins with the first images of all: load checkpoint.pt if it is there, and "
                "never remove it: os.replace puts the new file in its place")
    elif begin % EPOCH_STEPS == 0:
        hint = "it begins with the first images of an epoch: skip those of the steps made before"
    else:
        hint = (f"it begins with the images of step {begin + 1}: from what you save follow the "
                "epoch's number, for set_epoch, and the steps (not images) made in it. The last "
                "step before you save counts; at SIGTERM, too, save")
    yield f"  it begins after step {lowest}" + (f" to {highest}" if highest > lowest else ""), (
        begin is not None and lowest <= begin <= highest), hint
    for later, what, hint in (
            (0, "parameters", "the model's state_dict, saved after a step"),
            (1, "next step", "the optimizer's state_dict, too, which has the momentum")):
        expected = whole["parameters"][begin + later]
        wrong = [rank for rank, result in enumerate(results)
                 if not same_tensors(result["parameters"][later], expected)]
        yield f"  with the same {what}", not wrong, (
            f"ranks {wrong} have other ones: every rank has to load {hint}")
    yield "  and the same images to its end", job_steps == steps[begin:begin + len(job_steps)], (
        "the images of a later step differ: skip images only in the epoch in which the job begins; "
        "and at the end leave main(), not only the loop over the loader")
    return begin


def steps_of(results):
    """Return the images of each step, of all ranks."""
    return [{image.numpy().tobytes() for images in batches for image in images}
            for batches in zip(*(result["batches"] for result in results))]
