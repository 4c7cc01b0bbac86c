"""The commands that the chapters' pages print with flags, for a cluster too, train with these on this CPU."""

import os
import re

import pytest
from conftest import ROOT, case, run

FLAGS = r"(?: --\w[\w-]*(?: [\w./]+)?)+"
LAUNCHED = re.compile(rf"^(?!-).*(?:mpiexec|srun) [^#`]*?python (\S*)main\.py({FLAGS})", re.M)  # - : gone, in a diff
SUBMITTED = re.compile(rf'()submit\.(?:slurm|pbs)({FLAGS})|()FLAGS="([^"]+)" submit\.pbs')
# No network, and seconds on a CPU:
SMALLER = {"svhn": "synthetic", "224": "32", "128": "4", "512": "16", "4096": "512", "24": "2"}


def commands():
    """(folder of a chapter, flags) of each command, once; not of those with names to fill in, such as DATASET."""
    found = {}
    for page in sorted(ROOT.glob("0*/**/README.md")):
        for pattern in LAUNCHED, SUBMITTED:
            for match in pattern.finditer(page.read_text()):
                below, flags = (part for part in match.groups() if part is not None)
                words = [SMALLER.get(word, word) for word in flags.split()]
                if not any(word.isupper() for word in words):
                    found[os.path.relpath(page.parent / below, ROOT), " ".join(words)] = None
    return [case(folder, flags, marks=[pytest.mark.slow] if "tensorflow" in folder else [])
            for folder, flags in found]


@pytest.mark.parametrize(("chapter", "flags"), commands())
def test_what_a_page_prints_for_a_cluster_trains(chapter, flags):
    """Three steps: with one synthetic image for all labels a ResNet's loss was nan in the second."""
    done = run(chapter, 1 if chapter.startswith("01") else 2, *flags.split(), "--max-steps", 3)
    assert done.code == 0 and "steps: 0 of 3 done" in done.out and "test accuracy" in done.out, done.err


@pytest.mark.check
def test_there_are_such_commands():
    found = [each.values for each in commands()]
    assert ("03_ddp", "--model resnet50 --dataset synthetic --image-size 32 --precision bf16 --batch-size 4") in found
    assert ("03_ddp", "--global-batch-size 64") in found
