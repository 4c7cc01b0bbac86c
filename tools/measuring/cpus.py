"""Run the numeric tests while emulating older CPUs, with one and two threads per rank.

Another CPU sums in another order, and so rounds differently. PyTorch, oneDNN, MKL and TensorFlow
have variables that limit the instruction set, so that one machine can round as several CPUs do. A
variable that names an instruction set that the CPU lacks has no effect.
"""

import os
import subprocess
import sys

from submit.study import ROOT, processor

AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "DNNL_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
SSE = {"ATEN_CPU_CAPABILITY": "default", "DNNL_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"}
SETTINGS = {  # {name: environment variables}
    "unchanged": {},
    "AVX2": AVX2,
    "AVX2 in MKL only": {"MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "AVX-512 without bf16": {"DNNL_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
    "SSE4.1": SSE,
    "TensorFlow without oneDNN": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2",
                                  "TF_ENABLE_ONEDNN_OPTS": "0"}}
THREADS = {"unchanged": 2, "AVX2 in MKL only": 2, "SSE4.1": 2}  # per rank; the default is one


def main():
    failures = []
    for name, variables in SETTINGS.items():
        threads = THREADS.get(name, 1)
        print(f"\n{processor()}, {name}, {threads} thread(s) per rank", flush=True)
        env = os.environ | variables | {
            "TEST_THREADS": str(threads),
            "OMP_WAIT_POLICY": "PASSIVE"}  # there are more threads than cores, so none may spin
        command = [sys.executable, "-m", "pytest", "-m", "numbers", "-n", "2", "-q"]
        if subprocess.run(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL).returncode:
            failures.append(name)
    if failures:
        sys.exit(f"cpus.py: numeric tests failed with: {', '.join(failures)}")


if __name__ == "__main__":
    main()
