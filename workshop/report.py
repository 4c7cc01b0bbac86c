"""Measure a training run, print its progress, and write the record of --results.

Without this file and the lines of main.py that contain `report`, the training is the same.
"""

import json
import math
import os
import resource
import statistics
import sys
import time

from workshop.devices import gather
from workshop.gpus import find_gpu
from workshop.ranks import refuse

STARTED = time.perf_counter()


def gpt_flops(layers: int, width: int, context: int) -> int:
    """Return the FLOPs per token of a training step of chapter 5's GPT.

    6 per parameter of a matrix product (2 in forward, 4 in backward; the embedding is looked up),
    and causal attention: a token sees half of the context, on average. What activation
    checkpointing repeats does not count.
    """
    matrices = layers * 12 * width**2 + 256 * width  # blocks, head
    return 6 * matrices + 6 * layers * width * context


class Report:
    """Measure every rank's steps; on rank 0, print the progress and write the record.

    samples: what a batch consists of. record: the entries of the record that are known before the
    first step.
    """

    def __init__(self, args, rank=0, samples="images", **record):
        self.args, self.rank, self.samples, self.record = args, rank, samples, record
        self.step_seconds, self.gpu = [], None  # gpu: torch.cuda, torch.xpu, ...
        self.profiler = None
        torch = sys.modules.get("torch")  # None in a TensorFlow program
        if torch and record["device"] != "cpu":
            self.gpu = torch.get_device_module(record["device"])

    def print(self, line):
        if self.rank == 0:
            print(line, flush=True)
            self.last_print = time.perf_counter()

    def start_run(self, count, step, last_step, epoch_steps, lr):
        """Print the setup. Call it before the first step. count: samples in the training set."""
        if len({*gather(step)}) > 1:
            sys.exit("the ranks have read different checkpoints: all nodes need the same disk")
        record = self.record
        record[self.samples] = count
        self.print(f"{record['dataset']}: {count:,} {self.samples}, {record['model']}: "
                   f"{record['parameters']:,} parameters, {record['precision']}, "
                   f"{record['device']}")
        self.print(f"ranks: {record['ranks']}, nodes: {record['nodes']}, batch: "
                   f"{record['batch_size']} per rank, {record['global_batch_size']} global, "
                   f"learning rate: {lr:g}, steps: {step} of {last_step} done, {epoch_steps} per "
                   "epoch")
        ends_epoch = step == last_step or last_step // epoch_steps > step // epoch_steps
        if getattr(self.args, "checkpoint", None) and not ends_epoch:
            self.print("note: --checkpoint saves after each whole epoch: this run ends before")
        self.last_step, self.steps_done = last_step, step
        if getattr(self.args, "profile", None):
            if last_step - step < 8:
                refuse("--profile traces steps 6 to 8: train for 8 steps or more")
            if self.rank == 0:
                self.start_profiler()

    def start_profiler(self):
        """Write a trace of the sixth to eighth step to --profile's file."""
        import torch
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # hide the profiler's own messages
        schedule = torch.profiler.schedule(skip_first=4, wait=0, warmup=1, active=3, repeat=1)
        self.profiler = torch.profiler.profile(
            schedule=schedule,
            acc_events=True,
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(self.args.profile))
        self.profiler.start()

    def start_epoch(self):
        """Start the clock. Call this method before the first step of an epoch."""
        self.epoch_started, self.step_ends = time.perf_counter(), [self.now()]

    def end_step(self, steps_done):
        """Record the time if another step is done. Call this method after each micro-batch."""
        if steps_done == self.steps_done:
            return
        self.steps_done = steps_done
        self.step_ends.append(self.now())
        if self.profiler:
            self.profiler.step()
        if self.rank == 0 and time.perf_counter() - self.last_print > 10:
            self.print(f"  step {steps_done} of {self.last_step}")

    def now(self):
        if not self.gpu:
            return time.perf_counter()
        # The GPU records the event after the step's kernels; the CPU does not wait for it.
        return self.gpu.current_stream().record_event(self.gpu.Event(enable_timing=True))

    def end_epoch(self, epoch, loss, accuracy=None):
        """Print an epoch's results. The caller has read them from the device, which is idle.

        Without an accuracy, the loss is in bits per byte of text.
        """
        seconds = time.perf_counter() - self.epoch_started
        speed = self.measure_speed(len(self.step_ends) - 1, seconds)
        rate = f"{speed['images_per_second']:,.0f} images/s"
        if "tokens_per_second" in speed:
            rate = f"{speed['tokens_per_second']:,.0f} tokens/s"
        if "mfu" in speed:
            rate += f", MFU {speed['mfu']:.1%}"
        if not math.isfinite(loss):
            sys.exit(f"the loss became {loss} in epoch {epoch + 1}: lower --lr, or use "
                     "--warmup-epochs")
        unit = " bits per byte" if accuracy is None else f", accuracy {accuracy:.4f}"
        self.print(f"epoch {epoch + 1}/{self.args.epochs}: loss {loss:.4f}{unit}, {rate}")
        self.step_seconds += [start.elapsed_time(end) / 1000 if self.gpu else end - start
                              for start, end in zip(self.step_ends, self.step_ends[1:])]
        self.record["loss"] = loss
        if accuracy is not None:
            self.record["accuracy"] = accuracy

    def measure_speed(self, steps, seconds):
        """Return the record's entries on speed. mfu: in bf16, on a GPU whose peak is known."""
        record = self.record
        speed = {"images_per_second": steps * record["global_batch_size"] / seconds}
        if record["model"] == "GPT":
            speed["tokens_per_second"] = record["context"] * speed["images_per_second"]
            gpu = self.gpu and find_gpu(self.gpu.get_device_name())
            if gpu and record["precision"] == "bf16":
                flops = gpt_flops(record["layers"], record["width"], record["context"])
                speed["mfu"] = flops * speed["tokens_per_second"] / (record["ranks"] * gpu.peak)
        return speed

    def end_run(self, correct, total, **entries):
        """Print the test accuracy; write the record, with these entries added or replaced."""
        self.print(f"test accuracy {correct / total:.4f} ({correct} of {total} images)")
        self.write_record(test_accuracy=correct / total, **entries)

    def write_record(self, **entries):
        """Write the record, with these entries added or replaced."""
        if self.rank > 0 or not self.args.results or not self.step_seconds:
            return
        step_time = statistics.median(self.step_seconds[5:] or self.step_seconds)  # without warm-up
        bytes_per_parameter = 8 if self.record["precision"] == "fp64" else 4
        self.record |= {"steps": len(self.step_seconds), "step_seconds": step_time,
                        **self.measure_speed(1, step_time),
                        "gradient_bytes": bytes_per_parameter * self.record["parameters"],
                        "peak_memory_bytes": self.peak_memory(),
                        "total_seconds": time.perf_counter() - STARTED, **entries}
        line = json.dumps(self.record)
        try:
            with open(self.args.results, "a") as file:
                file.write(f"{line}\n")
        except OSError as problem:  # if the disk is full, print the record
            sys.exit(f"could not write the record to {self.args.results} ({problem.strerror}): "
                     f"{line}")

    def peak_memory(self):
        if self.gpu:
            return self.gpu.max_memory_allocated()
        unit = 1 if sys.platform == "darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
