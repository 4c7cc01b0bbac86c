"""Does the proof notice? Each mutant is this tree with one mistake in it; the tests named beside it have to fail.

    make mutants                                    # all: some ten minutes on two cores
    python tests/mutants.py 03_ddp sweep            # those whose file or mistake has one of the words

Every kind of mistake is here that the workshop warns of. A mutant that lives is a hole in the tests.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 600  # seconds: none of them hangs for ever


class Mutant(NamedTuple):
    mistake: str
    file: str  # in a chapter: copies of it in other chapters get the same mistake
    old: str  # stands there once
    new: str
    tests: str  # what pytest runs: a file and an expression for -k, which do not read the file's text


MUTANTS = [
    # Chapters: what is averaged, dealt out, counted
    Mutant("gradients are not averaged", "03_ddp/main.py", "logits = ddp(", "logits = model(",
           "test_equality.py fp64_after_every_epoch and 03_ddp-2"),
    Mutant("gradients are summed", "03_ddp/main.py", "loss.backward()", "(loss * world_size).backward()",
           "test_equality.py fp64_after_every_epoch and 03_ddp-2"),
    Mutant("every epoch has one order", "03_ddp/main.py", "sampler.set_epoch(epoch)", "sampler.set_epoch(0)",
           "test_equality.py fp64_after_every_epoch and 03_ddp-2"),
    Mutant("all ranks get the same images", "03_ddp/main.py", "(train, world_size, rank,",
           "(train, world_size, 0,",
           "test_data.py deals_out and 03_ddp"),
    Mutant("every rank tests all images", "03_ddp/main.py", "range(rank, len(test), world_size)", "range(len(test))",
           "test_equality.py evaluation_counts"),
    Mutant("the loss is summed over ranks", "03_ddp/main.py", "        means /= world_size\n", "",
           "test_launchers.py test_launcher and mpiexec"),
    Mutant("rank 1 saves", "03_ddp/main.py", "epoch_done and rank == 0", "epoch_done and rank == 1",
           "test_equality.py fp64_after_every_epoch and 03_ddp-1"),
    Mutant("half an epoch is saved", "03_ddp/main.py", "epoch_done = step % epoch_steps == 0", "epoch_done = True",
           "test_equality.py resume_reaches and 03_ddp"),
    Mutant("momentum is lost on resume", "03_ddp/main.py",
           '            optimizer.load_state_dict(checkpoint["optimizer"])\n', "",
           "test_equality.py resume_reaches and 03_ddp"),
    Mutant("the learning rate does not follow the batch", "01_single_node/main.py", "args.global_batch_size / 256",
           "64 / 256", "test_contract.py learning_rate and 01_single_node"),
    Mutant("the warm-up begins at nothing", "01_single_node/main.py", "(step + 1) / warmup_steps",
           "step / warmup_steps", "test_contract.py learning_rate and 01_single_node"),
    Mutant("the order does not follow the seed", "01_single_node/main.py", "manual_seed(args.seed + epoch)",
           "manual_seed(epoch)", "test_data.py as_the_seed_says"),
    Mutant("inputs are not standardised", "01_single_node/main.py", "(images.to(dtype) - mean) / std",
           "images.to(dtype) / 255", "test_contract.py plain_pytorch or standardised"),
    Mutant("Horovod wraps nothing", "02_horovod/pytorch/main.py",
           "hvd.DistributedOptimizer(optimizer, model.named_parameters())", "optimizer",
           "test_equality.py fp64_after_every_epoch and horovod/pytorch-2"),
    Mutant("the tape is not wrapped", "02_horovod/tensorflow/main.py", "hvd.DistributedGradientTape(tape)", "tape",
           "test_equality.py fp64_after_every_epoch and horovod/tensorflow-2"),
    Mutant("TensorFlow's ranks share no images out", "02_horovod/tensorflow/main.py", "[rank::world_size]",
           "[::world_size]",
           "test_data.py deals_out and tensorflow"),
    Mutant("the ring adds one chunk too few", "02_horovod/ring_allreduce.py", "range(world_size - 1):  # reduce",
           "range(world_size - 2):  # reduce",
           "test_allreduce.py what_is_counted and 3"),
    Mutant("DeepSpeed clips gradients", "04_deepspeed/ds_config.json", '"gradient_clipping": 0.0',
           '"gradient_clipping": 0.1', "test_equality.py fp32_differs and 04_deepspeed-2"),
    Mutant("accumulation is not heeded", "04_deepspeed/main.py", "parts = world_size * accumulation",
           "parts = world_size",
           "test_deepspeed.py accumulated"),
    Mutant("a checkpoint without its parts", "04_deepspeed/checkpoints.py", "    write(place)\n",
           "    (folder / place).mkdir(parents=True, exist_ok=True)\n", "test_deepspeed.py resume_reaches"),
    Mutant("ZeRO stays at stage 0", "05_zero/main.py", '{"stage": args.stage,', '{"stage": 0,',
           "test_zero.py plain_training and 05_zero-3-2 or plain_training and 2-05_zero-3"),
    Mutant("FSDP starts from other parameters", "05_zero/fsdp.py", "dist.broadcast(tensor.detach(), 0)",
           "tensor.detach().mul_(1 + dist.get_rank() / 100)", "test_zero.py fsdp_in_fp64"),
    Mutant("the formula forgets the moments", "05_zero/accounting.py", "moments * shared_by_all",
           "shared_by_all",
           "test_zero.py paper_s_example"),
    # Launchers and ends
    Mutant("the local rank is the rank", "01_single_node/ranks.py", 'env["SLURM_LOCALID"]',
           'env["SLURM_PROCID"]', "test_launchers.py slurm_s_first_node or test_launcher or local_rank"),
    Mutant("two steps of a job meet at one port", "01_single_node/ranks.py",
           'int(env["SLURM_JOB_ID"]) + int(env["SLURM_STEP_ID"])', 'int(env["SLURM_JOB_ID"])',
           "test_launchers.py two_jobs"),
    Mutant("an error on one rank lets the others wait", "01_single_node/ranks.py",
           "        os.kill(os.getpid(), signal.SIGTERM)", "        return",
           "test_mistakes.py error_on_one_rank and 03_ddp"),
    Mutant("a mistake's code is 1", "01_single_node/ranks.py", "code = 2 if end.code else 0",
           "code = 1 if end.code else 0", "test_mistakes.py test_mistake and 03_ddp"),
    Mutant("every rank tells of a mistake", "01_single_node/ranks.py", "if end.code and rank == 0:", "if end.code:",
           "test_launchers.py one_speaks_for_all"),
    Mutant("chapter 1 lets several ranks pass", "01_single_node/main.py",
           "    refuse_lone_ranks(1, one_process=True)  # several would each train the same\n", "",
           "test_launchers.py chapter_1_refuses"),
    Mutant("a batch that does not divide passes", "01_single_node/workshop.py",
           "if args.global_batch_size % (world_size * accumulation):", "if False:",
           "test_mistakes.py global_batch_has_to_divide and 03_ddp"),
    Mutant("images/s of one rank alone", "01_single_node/workshop.py",
           '"images_per_second": self.args.global_batch_size / step_time', '"images_per_second": '
           "self.args.batch_size / step_time", "test_contract.py several_ranks and 03_ddp"),
    # Cluster, measuring, pages
    Mutant("a sweep begins again", "submit/sweep.py", 'if "failed" not in record}', "if False}",
           "test_sweep.py killed_sweep"),
    Mutant("a broken last line takes the next one along", "submit/runs.py",
           'b"" if not file.tell() or file.read(1) == b"\\n" else b"\\n"', 'b""',
           "test_runs.py cut_off"),
    Mutant("a study goes on with other code's runs", "submit/runs.py",
           'any(line["here"] != self.here for line in lines)', "False", "test_runs.py other_code"),
    Mutant("a dirty tree publishes", "submit/records.py", 'return head.stdout.strip() + ("-dirty" if changes.stdout '
           'else "")', "return head.stdout.strip()", "test_records.py dirty"),
    Mutant("flags of PBS are torn apart", "submit/site.sh", 'case "${PBS_O_WORKDIR:+${FLAGS:-}}" in', 'case "" in',
           "test_slurm.py tear_apart"),
    Mutant("readers scatter one rank's images to all", "reading_data/read_data.py", "order[member, step], batch)",
           "order[0, step], batch)", "test_read_data.py same_bytes and 2"),
    Mutant("a stale page", "03_ddp/README.md", "-    refuse_lone_ranks(1, one", "-    refuse_lone_ranks(2, one",
           "test_repository.py readme_is_fresh and 03_ddp/README"),
    # What survives a fault
    Mutant("a checkpoint is written in its place", "03_ddp/main.py",
           'f"{args.checkpoint}.tmp")\n            os.replace(f"{args.checkpoint}.tmp", args.checkpoint)',
           "args.checkpoint)", "test_checkpoints.py a_kill_while and 03_ddp"),
    Mutant("nobody ends a job that stands still", "03_ddp/main.py", "[device.type], timeout=timeout)",
           "[device.type])", "test_deaths.py 03_ddp and SIGSTOP"),
    Mutant("each rank takes a port of its own", "03_ddp/ranks.py", "MPI.COMM_WORLD.bcast((host, free_port()))",
           "host, free_port()", "test_launchers.py test_launcher and MPICH"),
    Mutant("copies drift", "05_zero/ranks.py", "One answer under", "An answer under", "test_repository.py to_the_byte"),
    Mutant("tools are used on a cluster", "submit/check_script.py", "import re\n",
           "import re\nimport tools\n", "test_repository.py arrows"),
]


def plant(mutant, tree):
    """Put the mistake into a copy of the tree, and into the copies of its file that had the same text."""
    path = tree / mutant.file
    before = path.read_text()
    if before.count(mutant.old) != 1:
        sys.exit(f"{mutant.mistake}: {mutant.old!r} stands {before.count(mutant.old)} times in {mutant.file}")
    after = before.replace(mutant.old, mutant.new)
    for copy in [path] if mutant.mistake == "copies drift" else tree.glob(f"[0-9]*/**/{path.name}"):
        if copy.read_text() == before:
            copy.write_text(after)
    path.write_text(after)


def noticed(mutant):
    """The first test that fails on the mutant, or None."""
    file, _, words = mutant.tests.partition(" ")
    with tempfile.TemporaryDirectory() as folder:
        listed = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True, check=True).stdout
        for name in listed.splitlines():
            if (ROOT / name).is_file():
                Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, Path(folder, name))
        plant(mutant, Path(folder))
        pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
        done = subprocess.run([*pytest, f"tests/{file}", "-k", words], cwd=folder, capture_output=True, text=True,
                              timeout=TIMEOUT)
    if done.returncode not in (0, 1):  # nothing was collected, or pytest itself failed
        sys.exit(f"{mutant.mistake}: pytest {mutant.tests} ended with {done.returncode}:\n{done.stdout[-2000:]}")
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
    return found[1] if found else None


def main():
    words = sys.argv[1:]
    chosen = [mutant for mutant in MUTANTS
              if not words or any(word in mutant.file or word in mutant.mistake for word in words)]
    living = 0
    for mutant in chosen:
        started = time.monotonic()
        test = noticed(mutant)
        living += test is None
        print(f"{mutant.file}: {mutant.mistake}: {test or 'NOT NOTICED'} ({time.monotonic() - started:.0f} s)",
              flush=True)
    print(f"{len(chosen) - living} of {len(chosen)} mutants were noticed")
    sys.exit(bool(living))


if __name__ == "__main__":
    main()
