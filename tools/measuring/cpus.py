"""Run the tests that compare numbers as on several CPUs, with one and with two threads a rank; print the differences.

    make test-cpus          # or: python -m tools.measuring.cpus --settings SSE4.1 AVX2

PyTorch, oneDNN, MKL and TensorFlow have switches that leave out instructions of this CPU, so one machine can stand for
several: another CPU sums in another order, and so rounds otherwise. A switch that asks for more than the CPU has does
nothing. The tests are those marked `numbers`: a numeric core.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

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
    """Run the tests, which print for themselves. Returns pytest's exit code and [kind, difference, bound] of each."""
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder, "numbers.jsonl")
        env = os.environ | SETTINGS[setting] | {"TEST_THREADS": str(threads), "NUMBERS": str(notes),
                                                "OMP_WAIT_POLICY": "PASSIVE"}  # more threads than cores: none spins
        done = subprocess.run([sys.executable, "-m", "pytest", "-m", "numbers", "-n", "2", "-q"], cwd=ROOT, env=env,
                              stdin=subprocess.DEVNULL)
        found = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
    return done.returncode, found


def main():
    parser = Parser(__doc__)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=[*SETTINGS], metavar="NAME",
                        help=f"some of: {', '.join(SETTINGS)}")
    names = parser.parse_args().settings
    codes = []
    for setting, threads in [row for row in ROWS if row[0] in names]:
        print(f"\n{processor()}, {setting}, {threads} thread(s) a rank", flush=True)
        code, found = run(setting, threads)
        codes.append(code)
        for kind in sorted({kind for kind, *_ in found}):
            values = [value for each, value, _ in found if each == kind]
            print(f"{kind}: {min(values):.1e} to {max(values):.1e}")
    if any(codes):
        sys.exit("cpus.py: a test that compares numbers fails under some setting of this CPU")


if __name__ == "__main__":
    main()
