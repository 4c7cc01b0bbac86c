"""The commands on the chapters' pages, also those for a cluster, train here with their flags."""

import os
import re

import pytest
from conftest import ROOT, case, run

FLAGS = r"(?: --\w[\w-]*(?: [\w./]+)?)+"
LAUNCHED = re.compile(rf"^(?!-).*(?:mpiexec|srun) [^#`]*?python (\S*)main\.py({FLAGS})", re.M)
SUBMITTED = re.compile(rf'()submit\.(?:slurm|pbs)({FLAGS})|()FLAGS="([^"]+)" submit\.pbs')
# No network, and seconds on a CPU:
SMALLER = {"svhn": "synthetic", "224": "32", "128": "4", "512": "16", "4096": "512", "24": "2"}


def commands():
    """Return one case per command, without those that have placeholders such as DATASET."""
    pairs = set()
    for page in sorted(ROOT.glob("0*/**/README.md")):
        for pattern in LAUNCHED, SUBMITTED:
            for match in pattern.finditer(page.read_text()):
                relative_folder, flags = (part for part in match.groups() if part is not None)
                words = [SMALLER.get(word, word) for word in flags.split()]
                if not any(word.isupper() for word in words):
                    folder = os.path.relpath(page.parent / relative_folder, ROOT)
                    pairs.add((folder, " ".join(words)))
    assert len(pairs) > 5, pairs
    return [case(folder, flags, marks=[pytest.mark.slow] if "tensorflow" in folder else [])
            for folder, flags in sorted(pairs)]


@pytest.mark.parametrize(("chapter", "flags"), commands())
def test_cluster_commands_of_pages_train(chapter, flags):
    """With three steps, because a ResNet's loss may become nan on constant images."""
    ranks = 1 if chapter.startswith("01") else 2
    done = run(chapter, ranks, *flags.split(), "--max-steps", 3)
    assert done.code == 0 and "steps: 0 of 3 done" in done.out, done.err
    assert "test accuracy" in done.out, done.err
