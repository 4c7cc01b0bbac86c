"""Build results/slides/slides.html from docs/slides.md: one file that needs no network.

A line `---` separates slides. What follows `Note: H:MM. ` is for the speaker; H:MM is the minute of
the half day. nbconvert's slides need reveal.js, which no package of the environment contains; so
slides.html, next to this file, turns the pages. Links lead to the site that `make site` builds.
"""

import base64
import html
import mimetypes
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

from cluster.launch import ROOT

SOURCE, OUTPUT = ROOT / "docs/slides.md", ROOT / "results/slides/slides.html"
COLOURS = HtmlFormatter(style="a11y-high-contrast-light", nowrap=True)


@dataclass
class Slide:
    body: str
    minute: int
    notes: str


def read_slides():
    """Return the slides of the source. Raises ValueError if one has no notes with a minute."""
    slides = []
    text = re.sub(r"\A<!--.*?-->\n", "", SOURCE.read_text(), flags=re.S)
    for part in re.split(r"^---\n", text, flags=re.M):
        found = re.fullmatch(r"(.*?)^Note: (\d):(\d\d)\. (.*)", part, re.M | re.S)
        if not found:
            raise ValueError(f"no `Note: H:MM. ` in the slide {part.strip().splitlines()[0]}")
        body, hour, minute, notes = found.groups()
        slides.append(Slide(body.strip(), 60 * int(hour) + int(minute), notes.strip()))
    return slides


def color(code, language, _):
    """Return code as HTML, as large as its longest line permits: 20 to 30 pixels."""
    width = 1208 / max(map(len, code.splitlines()))  # pixels per character, 0.6 of its height
    style = f"font-size: {min(30, max(20, width / .603)):.1f}px; letter-spacing: "
    style += f"{max(-1, min(0, width - 12.06)):.2f}px"
    text = highlight(code, get_lexer_by_name(language or "text", stripnl=False), COLOURS)
    return f'<pre style="{style}">{text.rstrip()}</pre>'


def embed(match):
    """Return a picture's address with its content in it."""
    path = SOURCE.parent / match[1]
    kind, content = mimetypes.guess_type(path)[0], base64.b64encode(path.read_bytes()).decode()
    return f'src="data:{kind};base64,{content}"'


def link(match):
    """Return the address of a page in the site, as seen from the slides."""
    page = os.path.relpath((SOURCE.parent / match[1]).resolve(), ROOT)
    return f'href="../site/{page}.html{match[2]}"'


def render(slides):
    """Return the slides as one HTML page."""
    markdown = MarkdownIt("commonmark", {"highlight": color}).enable("table")
    sections, part = [], ""
    for number, slide in enumerate(slides, 1):
        part = slide.body.splitlines()[0][2:] if slide.body.startswith("# ") else part
        minute = f"{slide.minute // 60}:{slide.minute % 60:02}"
        body = re.sub(r"<p>(?=<img)", '<p class="figure">', markdown.render(slide.body))
        notes = markdown.render(f"**{minute}** {slide.notes}")
        sections.append(f'<section><div class="slide" data-number="{number} / {len(slides)}" '
                        f'data-part="{html.escape(part)}">\n{body}</div>\n<aside>{notes}</aside>'
                        "</section>\n")
    text = re.sub(r'src="(?!data:)([^"]+)"', embed, "".join(sections))
    text = re.sub(r'href="(?!https?:)([^"#]+)\.(?:md|ipynb)(#[^"]*)?"',
                  lambda match: link({1: match[1], 2: match[2] or ""}), text)
    template = Path(__file__).with_suffix(".html").read_text()
    return template.replace("PYGMENTS", COLOURS.get_style_defs("pre")).replace("SLIDES", text)


if __name__ == "__main__":
    try:
        page = render(read_slides())
    except (OSError, ValueError) as error:
        sys.exit(f"{SOURCE.relative_to(ROOT)}: {error}")
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text(page)
    print(OUTPUT.relative_to(ROOT))
