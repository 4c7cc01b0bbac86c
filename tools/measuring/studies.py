"""Make assets/records/allreduce.jsonl or ddp_and_fsdp.jsonl.

    python -m tools.measuring.studies allreduce

allreduce: times of chapter 3's all-reduces on 2, 3 and 4 ranks. ddp_and_fsdp: times of the same GPT
under DDP and FSDP in three sizes, and the bytes that a rank sends.
"""

from cluster.launch import rank_command
from cluster.records import RECORDS
from cluster.study import run_for_records, run_study
from tools.measuring.zero import count
from workshop.flags import Parser


def time_allreduce(run: int, ranks: int) -> list[dict]:
    """Return one run's records of all sizes and algorithms; `run` is its number."""
    command = rank_command("03_ddp/ring_allreduce.py", ranks, "--repeats", 15)
    return run_for_records(command, timeout=1800)


def time_ddp_and_fsdp(width: int) -> dict:
    """Return the record of one size, with the bytes that rank 0 sends in a step of each."""
    program, flags = "05_zero/ddp_and_fsdp.py", ("--width", width)
    record, = run_for_records(rank_command(program, 2, *flags))
    sent = {}
    for wrapper in record["seconds"]:
        footprint = count(program, 2, *flags, "--wrapper", wrapper)
        sent[wrapper] = sum(row["bytes"] for row in footprint["sent"]
                            if row["operation"] != "broadcast")  # DDP's, in the second step only
    return record | {"sent": sent}


STUDIES = {
    "allreduce": (time_allreduce, [{"run": run, "ranks": ranks}
                                   for run in range(3) for ranks in (2, 3, 4)]),
    "ddp_and_fsdp": (time_ddp_and_fsdp, [{"width": width} for width in (96, 192, 384)])}


if __name__ == "__main__":
    parser = Parser(__doc__)
    parser.add_argument("study", choices=STUDIES)
    study = parser.parse_args().study
    measure, plan = STUDIES[study]
    run_study(RECORDS / f"{study}.jsonl", plan, measure)
