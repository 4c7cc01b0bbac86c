"""Two figures of each notebook, with their headings and what is said of them, as slides in one file: plan B.

    make slides        # results/slides.html: opens offline, a screen a slide; prints as PDF, a page a slide

A notebook's slides are its cells with the tag "slide".
"""

import base64
import html
import re
import sys
from pathlib import Path

import nbformat
from launch import ROOT
from nbconvert.filters import markdown2html

from tools.pages.notebooks import notebooks

PAGE = """<!doctype html>
<meta charset="utf-8"><title>Scaling Deep Learning: slides</title>
<style>
html {{ scroll-snap-type: y mandatory; font-family: sans-serif; }}
section {{ height: 100vh; scroll-snap-align: start; break-after: page; text-align: center; overflow: hidden; }}
section:last-of-type {{ break-after: auto; }}
img {{ max-width: 92vw; max-height: 66vh; }}
p {{ font-size: 3vh; margin: 1.5vh 6vw; }}
</style>
{slides}
"""


def picture(cell, folder: Path) -> str:
    """The cell's first figure, base64: one that code has drawn, or that a text shows."""
    if cell.cell_type == "markdown":
        address = re.search(r'<img src="([^"]+)"', cell.source)[1]
        return base64.b64encode((folder / address).read_bytes()).decode()
    return next(output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", {}))


def texts(cells: list) -> str:
    """What these cells say: text cells, and sentences that code has computed."""
    found = [cell.source if cell.cell_type == "markdown" else output.data["text/markdown"] for cell in cells
             for output in cell.get("outputs", [None]) if output is None or "text/markdown" in output.get("data", {})]
    return "\n\n".join(found)


def words(before: list, behind: list) -> tuple[str, str]:
    """The heading above a figure, and the first paragraph below that heading: the question is not asked on a slide."""
    text = texts(before)
    heading, _, below = text[max(found.start() for found in re.finditer(r"^#+ ", text, re.M)):].partition("\n")
    paragraphs = [part.strip() for part in f"{below}\n\n{texts(behind)}".split("\n\n")]
    plain = [part for part in paragraphs if part and not part.startswith(("**Predict.**", "<", "|", "-", "1.", "#"))]
    return heading.lstrip("# "), markdown2html(re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", plain[0]))


def slides_of(path: Path) -> list[str]:
    cells = nbformat.read(path, as_version=4).cells
    found = []
    for number, cell in enumerate(cells):
        if "slide" in cell.metadata.get("tags", []):
            heading, said = words(cells[:number + 1], cells[number + 1:])
            found.append(f'<section>\n<h1>{html.escape(heading)}</h1>\n<img src="data:image/png;base64,'
                         f'{picture(cell, path.parent)}">\n{said}\n</section>')
    return found


def main(target: Path) -> None:
    """Write the slides of all notebooks, in the order of the chapters."""
    target.parent.mkdir(exist_ok=True)
    target.write_text(PAGE.format(slides="\n".join(slide for path in notebooks() for slide in slides_of(path))))
    print(f"{target}: open it in a browser, or print it there as PDF")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "results" / "slides.html")
