"""The commands that the pages print for a cluster train with synthetic images: their flags, on this CPU."""

import re
import sys

import pytest
from conftest import ROOT, case, execute

PRINTED = re.compile(r'submit\.(?:slurm|pbs)((?: --[\w-]+ [^\s-]\S*)+)|FLAGS="([^"]+)"')


def commands():
    """(folder, flags) of those of the chapters' pages that take synthetic images, each once."""
    found = {}
    for page in sorted(ROOT.glob("0*/**/README.md")):
        for match in PRINTED.finditer(page.read_text()):
            flags = (match[1] or match[2]).split()
            if "synthetic" in flags:
                found[page.parent.relative_to(ROOT).as_posix(), *flags] = None
    return [case(folder, " ".join(flags)) for folder, *flags in found]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("chapter", "flags"), commands())
def test_what_a_page_prints_for_a_cluster_trains(chapter, flags, precision):
    """Three steps of one rank: with one synthetic image for all labels a ResNet's loss was nan in the second."""
    words = [sys.executable, ROOT / chapter / "main.py", *flags.split(), "--max-steps", 3, "--precision", precision]
    done = execute(words, timeout=300)
    assert done.code == 0 and "test accuracy" in done.out, done.err


def test_there_are_such_commands():
    assert {each.values[0] for each in commands()} >= {"01_single_node", "03_ddp"}
