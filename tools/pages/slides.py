"""Build results/slides/slides.html from docs/slides.md: one file that needs no network.

A line `---` separates slides. What follows `Note: H:MM. ` is for the speaker; H:MM is the minute of
the half day. nbconvert's slides need reveal.js, which no package of the environment contains; so
slides.html, next to this file, turns the pages. Links lead to the site that `make site` builds.
"""

import base64
import html
import mimetypes
import re
import sys
from collections import namedtuple
from pathlib import Path

from markdown_it import MarkdownIt
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

from cluster.launch import ROOT

SOURCE, OUTPUT = ROOT / "docs/slides.md", ROOT / "results/slides/slides.html"
COLOURS = HtmlFormatter(style="a11y-high-contrast-light", nowrap=True)
Slide = namedtuple("Slide", "body minute notes")


def read_slides():
    """Return the slides of the source. Raises ValueError if one has no notes with a minute."""
    slides = []
    for part in re.split(r"^---\n", SOURCE.read_text(), flags=re.M):
        match = re.fullmatch(r"(.*?)^Note: (\d):(\d\d)\. (.*)", part, re.M | re.S)
        if not match:
            raise ValueError(f"no `Note: H:MM. ` in the slide that begins with {part[:60]!r}")
        body, hour, minute, notes = match.groups()
        slides.append(Slide(body, 60 * int(hour) + int(minute), notes))
    return slides


def color(code, language, _):
    """Return code as HTML, as large as its longest line permits: 20 to 30 pixels.

    Text, such as the output of a program, has at least 25 pixels; its longest lines wrap.
    """
    width = 1206 / max(map(len, code.splitlines()))  # pixels per character: 0.603 of the size
    size = min(30, max(20 if language else 25, width / 0.603))
    spacing = max(-1, min(0, width - 0.603 * size)) if language else 0
    text = highlight(code, get_lexer_by_name(language or "text"), COLOURS).rstrip()
    return f'<pre style="font-size: {size:.2f}px; letter-spacing: {spacing:.2f}px">{text}</pre>'


def address(match):
    """Return a figure's address with the figure in it, or a page's in the site."""
    path, _, anchor = match[2].partition("#")
    path = (SOURCE.parent / path).resolve()
    if match[1] == "src":
        content = base64.b64encode(path.read_bytes()).decode()
        return f'src="data:{mimetypes.guess_type(path)[0]};base64,{content}"'
    page = path.with_suffix(".html").relative_to(ROOT.resolve())
    return f'href="../site/{page}{"#" * bool(anchor)}{anchor}"'


def render(slides):
    """Return the slides as one HTML page."""
    markdown = MarkdownIt("commonmark", {"highlight": color}).enable("table")
    sections, part = [], ""
    for number, (body, minute, notes) in enumerate(slides, 1):
        chapter = re.search(r"^# ([^:\n]+)", body, re.M)
        part = html.escape(chapter[1]) if chapter else part
        notes = markdown.render(f"**{minute // 60}:{minute % 60:02}** {notes}")
        body = markdown.render(body).replace("<p><img", '<p class="figure"><img')
        sections.append(f'<section><div class="slide" data-number="{number} / {len(slides)}" '
                        f'data-part="{part}">\n{body}</div>\n<aside>{notes}</aside></section>\n')
    text = re.sub(r'(src|href)="(?!https?:)([^"]+)"', address, "".join(sections))
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
