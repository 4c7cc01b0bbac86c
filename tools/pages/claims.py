"""The register of claims: numbers and facts of the pages that nothing beside them shows, each with its proof.

assets/claims.toml has for each page the words that stand in it, the proof (a command, a record, code, or who prints it)
and the day on which somebody last looked. `make docs` makes CLAIMS.md of it. A number needs no entry where its page
shows it in a fence, which is cut from a record or a file, or in code.
"""

import re
import sysconfig
import tomllib
from pathlib import Path

from launch import ROOT

REGISTER = ROOT / "assets" / "claims.toml"
PAGE = ROOT / "CLAIMS.md"
# Cut from records or files; so are the paragraphs behind <!-- said: NAME -->, which docs.py writes
FENCES = re.compile(r"^ *```.*?^ *```|<!-- said: \w+ -->\n(?:[^\n]+\n)*|<!--.*?-->", re.M | re.S)
CODE = re.compile(r"`[^`]*`|<code>.*?</code>")
# What counts nothing: link targets, the numbers of papers and issues, years
NAMES = re.compile(r"\]\([^)]*\)|https?://\S+|\b\d{4}\.\d{5}\b|#\d+|\b(?:19|20)\d\d\b")
NUMBER = re.compile(r"(?<![\w.-])\d[\d.]*\d(?!\w)")


def register() -> dict[str, list[dict]]:
    """{page: [{"words", "proof", "looked"}, ...]}, in the order of the file."""
    return tomllib.loads(REGISTER.read_text())


def squeezed(text: str) -> str:
    """The text in one line, with one blank between two words."""
    return " ".join(text.split())


def shown(text: str) -> set[str]:
    """The numbers in the fences and in the code of a page."""
    code = " ".join([*FENCES.findall(text), *CODE.findall(FENCES.sub(" ", text))])
    return {number.rstrip(".") for number in re.findall(r"\d[\d.]*", code.replace(",", ""))}


def unexplained(text: str, claims: list[dict]) -> list[str]:
    """The numbers of two digits or more that neither the page shows nor a claim has, each with what stands around it.

    Raises ValueError for a claim whose words do not stand in the page once.
    """
    known, prose = shown(text), squeezed(FENCES.sub(" ", text))
    for claim in claims:
        words = squeezed(claim["words"])
        if prose.count(words) != 1:
            raise ValueError(f"{words!r} stands {prose.count(words)} times in the page")
        prose = prose.replace(words, " ")
    prose = NAMES.sub(" ", CODE.sub(" ", prose))
    prose = re.sub(r"(?<=\d),(?=\d{3})", "", prose)
    return [prose[max(0, found.start() - 40):found.end() + 20] for found in NUMBER.finditer(prose)
            if found[0].rstrip(".") not in known]


def render() -> str:
    """CLAIMS.md."""
    lines = ["# What the pages claim, and the proof", "",
             "Made by `make docs` from [assets/claims.toml](assets/claims.toml): what pages say and nothing beside it",
             "shows; the command, record, code or citation that proves it; and the day on which somebody last looked."]
    for page, claims in register().items():
        lines += ["", f"## [{page}]({page})", "", "| it says | proof | looked |", "|---|---|---|"]
        for claim in claims:
            words = re.sub(r"\]\([^)]*\)|!(?=\[)", lambda link: link[0][:1].strip("!"), squeezed(claim["words"]))
            words = words.strip("| ").replace("|", "\\|")
            lines.append(f"| {words} | {squeezed(claim['proof'])} | {claim['looked']} |")
    return "\n".join(lines) + "\n"


def write() -> None:
    if not PAGE.exists() or PAGE.read_text() != render():
        PAGE.write_text(render())
        print("written:", PAGE.relative_to(ROOT))


def paths(proof: str) -> list[Path]:
    """The files that a proof names: of this repository, or of an installed package."""
    packages = Path(sysconfig.get_paths()["purelib"])
    named = re.findall(r"\b(?:[\w.-]+/)+[\w.-]+\.(?:py|sh|pbs|slurm|ipynb|jsonl?|csv|txt|md)\b",
                       re.sub(r"\S+\.(?:org|com|gov|io)/\S+", " ", CODE.sub(" ", proof)))
    return [ROOT / name if (ROOT / name).exists() else packages / name for name in named]
