"""Run the tests that compare numbers as on several CPUs, with one and with two threads a rank; print one table.

    make test-cpus          # or: python -m tools.measuring.cpus --settings SSE4.1 AVX2

PyTorch, oneDNN, MKL and TensorFlow have switches that leave out instructions of this CPU, so one machine can stand for
several: another CPU sums in another order, and so rounds otherwise. A switch that asks for more than the CPU has does
nothing. The tests are those marked `numbers`: a numeric core.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas
from launch import ROOT, processor
from one_line import Parser

SETTINGS = {  # name: environment variables
    "as it is": {},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "DNNL_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "AVX2 in MKL alone": {"MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "AVX-512 without bf16": {"DNNL_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
    "SSE4.1": {"ATEN_CPU_CAPABILITY": "default", "DNNL_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"},
    "TensorFlow without oneDNN": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "TF_ENABLE_ONEDNN_OPTS": "0"}}
ROWS = [("as it is", 2), ("AVX2", 1), ("AVX2 in MKL alone", 2), ("AVX-512 without bf16", 1), ("SSE4.1", 2),
        ("TensorFlow without oneDNN", 1)]  # threads a rank; as it is with one thread is `make test`


def run(setting, threads):
    """A row of the table, and what pytest printed."""
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder, "numbers.jsonl")
        env = os.environ | SETTINGS[setting] | {"TEST_THREADS": str(threads), "NUMBERS": str(notes),
                                                "OMP_WAIT_POLICY": "PASSIVE"}  # more threads than cores: none spins
        started = time.monotonic()
        done = subprocess.run([sys.executable, "-m", "pytest", "-m", "numbers", "-n", "2", "-q"], cwd=ROOT, env=env,
                              text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        seconds = time.monotonic() - started
        found = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error|skipped)", done.stdout)}
    row = {"setting": setting, "threads": threads, "passed": counts.get("passed", 0),
           "failed": counts.get("failed", 0) + counts.get("error", 0), "skipped": counts.get("skipped", 0)}
    for kind in sorted({kind for kind, *_ in found}):
        row[kind] = (min if kind.startswith("broken") else max)(value for each, value, _ in found if each == kind)
    return row | {"seconds": round(seconds), "code": done.returncode}, done.stdout


def table(rows):
    """The rows as text, a column a setting: the kinds of differences have long names."""
    columns = pandas.DataFrame(rows).drop(columns="code").set_index(["setting", "threads"])
    shown = columns.map(lambda value: "" if pandas.isna(value) else
                        f"{value:.1e}" if isinstance(value, float) and not value.is_integer() else f"{value:g}")
    return shown.T.to_string()


def main():
    parser = Parser(__doc__)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=[*SETTINGS], metavar="NAME",
                        help=f"some of: {', '.join(SETTINGS)}")
    names = parser.parse_args().settings
    rows = []
    for setting, threads in [row for row in ROWS if row[0] in names]:
        row, printed = run(setting, threads)
        rows.append(row)
        print(f"{setting}, {threads} thread(s) a rank: {row['passed']} passed, {row['failed']} failed, "
              f"{row['seconds']} s", flush=True)
        if row["code"]:
            print(printed)
    print(f"\n{processor()}; the largest difference of each kind, of broken trainings the smallest\n\n{table(rows)}")
    if any(row["code"] for row in rows):
        sys.exit("cpus.py: a test that compares numbers fails under some setting of this CPU")


if __name__ == "__main__":
    main()
