"""Record the output of every command that a page shows, in assets/records/outputs.jsonl.

    python -m tools.pages.outputs cluster.plan    # only of commands with this text; without: of all

`make docs` writes these records into the pages; it runs no chapter itself.
"""

import sys

from cluster.launch import finish_job, rank_command, start_job
from cluster.records import RECORDS, describe_machine, read_records
from cluster.study import run_study
from tools.pages import docs


def record(command_line):
    """Return a record of what a command prints. Raises subprocess.CalledProcessError."""
    program, ranks, *flags = command_line.split()
    job = finish_job(start_job(rank_command(program, int(ranks), *flags), stderr=None))
    job.check_returncode()
    return {"command_line": command_line, "text": job.stdout.strip()} | describe_machine()


def find_command_lines():
    """Return the command lines of all fences with a run's output, in the order of the pages."""
    command_lines = [match[2] for path in docs.pages()
                     for match in docs.FENCE.finditer(path.read_text())
                     if match[1] == "output"]
    return list(dict.fromkeys(command_lines))  # each once


if __name__ == "__main__":
    text, path = " ".join(sys.argv[1:]), RECORDS / "outputs.jsonl"
    old_records = {row["command_line"]: row for row in read_records(path)}

    def record_or_keep(command_line):
        if text not in command_line and command_line in old_records:
            return old_records[command_line]
        return record(command_line)

    plan = [{"command_line": command_line} for command_line in find_command_lines()]
    run_study(path, plan, record_or_keep)
