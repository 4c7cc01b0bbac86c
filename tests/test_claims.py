"""What the pages say is shown beside it, or stands in the register with its proof."""

import datetime

import pytest
from conftest import ROOT

from tools.pages import claims, docs

REGISTER = claims.register()
PAGES = [path for path in docs.readmes() if path != claims.PAGE]


def text_of(path):
    """A page; an exercise's with the files beside it, whose numbers are its givens."""
    beside = sorted(path.parent.glob("*.py")) if path.parent.parent.name == "exercises" else []
    return "\n".join([path.read_text(), "```", *(file.read_text() for file in beside), "```", ""])


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_number_of_a_page_is_shown_or_registered(path):
    entries = REGISTER.get(str(path.relative_to(ROOT)), [])
    assert claims.unexplained(text_of(path), entries) == []


def test_a_number_that_nothing_explains_and_a_claim_that_is_stale_are_noticed():
    text = "It takes `--size 64`, so 64 images, 17 seconds\nand 2.5 GB ([2006.15704](https://x/30)).\n```\n17,000\n```\n"
    found = claims.unexplained(text, [])
    assert ["17" in found[0], "2.5" in found[1], len(found)] == [True, True, 2]
    assert len(claims.unexplained(text, [{"words": "17 seconds and"}])) == 1
    with pytest.raises(ValueError, match="stands 0 times"):
        claims.unexplained(text, [{"words": "18 seconds"}])


def test_every_proof_is_a_command_a_file_or_a_source_and_has_its_day():
    names = {str(path.relative_to(ROOT)) for path in PAGES}
    assert REGISTER.keys() <= names and sum(map(len, REGISTER.values())) >= 50
    for page, entries in REGISTER.items():
        for entry in entries:
            assert entry.keys() == {"words", "proof", "looked"}, (page, entry)
            proof = entry["proof"]
            assert "`" in proof or "/" in proof or "arithmetic" in proof or "doi" in proof, (page, entry)
            assert all(path.exists() for path in claims.paths(proof)), (page, proof)
            assert datetime.date(2025, 1, 1) < entry["looked"] <= datetime.date.today()


def test_the_page_is_fresh():
    assert claims.PAGE.read_text() == claims.render()
