"""The commands on the chapters' pages, also those for a cluster, train here with the same flags."""

import os
import re

import pytest
from conftest import ROOT, case, run

FLAGS = r"(?: --\w[\w-]*(?: [\w./]+)?)+"
LAUNCH_LINE = re.compile(rf"^(?!-).*(?:mpiexec|srun) [^#`]*?python (\S*)main\.py({FLAGS})", re.M)
SUBMIT_LINE = re.compile(rf'()submit\.(?:slurm|pbs)({FLAGS})|()FLAGS="([^"]+)" submit\.pbs')
# Values that need no network, and only seconds on a CPU
SMALL_VALUES = {"svhn": "synthetic", "224": "32", "128": "4", "512": "16", "4096": "512", "24": "2"}


def commands():
    """Return one case per command without a placeholder such as DATASET."""
    folders_and_flags = set()
    for page in sorted(ROOT.glob("0*/**/README.md")):
        for pattern in LAUNCH_LINE, SUBMIT_LINE:
            for match in pattern.finditer(page.read_text()):
                relative_folder, flags = (part for part in match.groups() if part is not None)
                words = [SMALL_VALUES.get(word, word) for word in flags.split()]
                if not any(word.isupper() for word in words):
                    folder = os.path.relpath(page.parent / relative_folder, ROOT)
                    folders_and_flags.add((folder, " ".join(words)))
    assert len(folders_and_flags) > 5, folders_and_flags
    return [case(folder, flags) for folder, flags in sorted(folders_and_flags)]


@pytest.mark.parametrize(("chapter", "flags"), commands())
def test_cluster_commands_of_pages_train(chapter, flags):
    """Three steps only, because a ResNet's loss may become nan on constant images."""
    ranks = 1 if chapter.startswith("01") else 2
    result = run(chapter, ranks, *flags.split(), "--max-steps", 3)
    assert result.code == 0 and "steps: 0 of 3 done" in result.out, result.err
    assert "\ntest " in result.out, result.err
