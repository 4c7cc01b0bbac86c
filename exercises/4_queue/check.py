"""Checks for exercise 4: a training that lost ranks, signals and half-written files interrupt."""

import io
import os
import random
import runpy
import signal
import tempfile
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from runner import NotRun, flatten, is_close
from scripts import run_with_torchrun
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

EPOCH_STEPS, STEPS, SAVE_STEPS = 29, 4 * 29, 10


def run(file, folder, ranks, event=None, step=None):
    """Run the script in `folder`. Return what each rank did, a problem, and if the event happened.

    event: a signal that rank 1 gets after `step` steps; or "save": a rank is killed when it has
    written half of a file. A rank's dict: "images" of each step, "parameters" before it; "end":
    parameters after the last step; "saves": their number.
    """
    def observe(file):
        os.chdir(folder)
        result = {"images": [], "parameters": [], "saves": 0}
        write_file = torch.save

        def before_forward(module, args):
            if isinstance(module, torch.nn.Sequential) and torch.is_grad_enabled():
                result["images"].append({image.numpy().tobytes() for image in args[0]})
                result["parameters"].append(flatten(module.parameters()))

        def after_step(optimizer, *_):
            result["end"] = flatten(optimizer.param_groups[0]["params"])
            if len(result["images"]) == step and dist.get_rank() == 1:
                send(event)

        def save(content, target, **options):
            write_file(content, target, **options)
            if isinstance(target, io.BytesIO):  # pickle's
                return
            result["saves"] += 1
            if event == "save":
                path = target.name if hasattr(target, "write") else target
                os.truncate(path, os.path.getsize(path) // 2)
                send(signal.SIGKILL)

        def send(number):
            Path(f"event {event}").touch()
            os.kill(os.getpid(), number)

        register_module_forward_pre_hook(before_forward)
        register_optimizer_step_post_hook(after_step)
        torch.save = save
        dist.destroy_process_group = lambda *_: None  # gloo may abort if DDP still uses it
        with suppress(SystemExit):
            runpy.run_path(str(file), run_name="__main__")
        return result

    try:
        results, problem = run_with_torchrun(file, ranks, observe), ""
    except NotRun as not_run:
        results, problem = [], str(not_run)
    return results, problem, (folder / f"event {event}").exists()


def checks(file):
    """Compare four jobs, one after another, with a training that nothing interrupts."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as jobs:
        results, problem, _ = run(file, Path(folder), 2)
        steps = steps_of(results)
        yield f"2 ranks that nothing interrupts train {STEPS} steps", len(steps) == STEPS, (
            problem or f"they train {len(steps)}: do not change the training")
        yield from check_jobs(file, Path(jobs), results[0], steps)


def check_jobs(file, folder, whole, steps):
    killed = random.randrange(6 * SAVE_STEPS + 1, 7 * SAVE_STEPS - 1)  # steps 59 and on: epoch 3
    run(file, folder, 2, signal.SIGKILL, killed)
    yield f"job 1, 2 ranks, rank 1 is killed after step {killed}: it leaves checkpoint.pt", (
        (folder / "checkpoint.pt").exists()), (
        f"no signal announces SIGKILL, so save after every {SAVE_STEPS} steps, too")

    delay = random.randrange(29, 36)  # into epoch 4
    results, problem, has_happened = run(file, folder, 3, signal.SIGTERM, delay)
    yield "job 2, 3 ranks, goes on", not problem or has_happened, (
        f"{problem}. Every rank has to load the checkpoint, and to begin at the same step")
    yield f"  after {delay} steps rank 1 gets SIGTERM: all ranks end", not problem, (
        f"{problem}. Only rank 1 got SIGTERM: its handler should set a variable, and nothing else. "
        "After each step an all-reduce of this variable tells all ranks whether to save and end")
    begin = yield from check_position(results, whole, steps, killed - SAVE_STEPS, killed)
    end = begin + len(results[0]["images"])
    yield f"  they end within {SAVE_STEPS} steps", end <= begin + delay + SAVE_STEPS, (
        f"they train to step {end}: after SIGTERM, which only rank 1 got, all leave main()")
    yield "  they leave no digits.pt", not (folder / "digits.pt").exists(), (
        "the job script takes this file for the end of training: leave main() before it is saved")
    savers = [rank for rank, result in enumerate(results) if result["saves"]]
    yield "  one rank saves, with torch.save", len(savers) == 1, (
        f"ranks {savers} save: ranks that write the same file at the same time may corrupt it"
        if savers else "no rank calls torch.save(state, file), which this grader watches")

    _, problem, has_happened = run(file, folder, 2, "save")
    yield "job 3, 2 ranks: the rank that saves is killed in the middle of the file", has_happened, (
        problem)
    results, problem, _ = run(file, folder, 1)
    yield "job 4, 1 rank, goes on", not problem, (
        f"{problem}. Does it read a half-written file? Write another file, then rename it with "
        "os.replace, which replaces the old file at once")
    yield from check_position(results, whole, steps, end, end)
    yield "  it ends with the parameters of the training that nothing has interrupted", (
        is_close(results[0]["end"], whole["end"])), "something else changes in training: save it"


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
                 if not is_close(result["parameters"][later], expected)]
        yield f"  with the same {what}", not wrong, (
            f"ranks {wrong} have other ones: every rank has to load {hint}")
    yield "  and the same images to its end", job_steps == steps[begin:begin + len(job_steps)], (
        "the images of a later step differ: skip images only in the epoch in which the job begins; "
        "and at the end leave main(), not only the loop over the loader")
    return begin


def steps_of(results):
    """Return the images of each step, of all ranks."""
    return [set.union(*images) for images in zip(*(result["images"] for result in results))]
