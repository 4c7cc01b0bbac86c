"""Configure the slides. `make slides` builds them from docs/slides.md; they need no network."""

import posixpath
import re

from docutils import nodes
from sphinx_revealjs.nodes import revealjs_section

project = "Scaling Deep Learning"
extensions = ["myst_parser", "sphinx_revealjs"]
root_doc = "slides"
include_patterns = ["slides.md"]
myst_all_links_external = True  # `make site` checks them
highlight_language = "text"
html_copy_source = False
revealjs_html_theme = "revealjs-simple"  # on a phone one can zoom in; the other theme forbids it
revealjs_style_theme = "white"
revealjs_static_path = ["slides.css"]
revealjs_css_files = ["slides.css"]
revealjs_script_plugins = [
    {"name": "RevealNotes", "src": "revealjs/plugin/notes/notes.js"},
    {"name": "RevealHighlight", "src": "revealjs/plugin/highlight/highlight.js"}]
revealjs_script_conf = {
    "width": 1280, "height": 720, "margin": 0, "center": False, "display": "flex", "hash": True,
    "navigationMode": "linear", "slideNumber": "c/t", "transition": "none", "controls": False,
    "scrollActivationWidth": 435, "scrollLayout": "compact",  # on a phone, one below the other
    "defaultTiming": 0}  # or the speaker's view does not compare the clock with the notes


def link_to_site(app, doctree):
    """Let links to pages open those of `make site`, each in a tab of its own."""
    for link in doctree.findall(nodes.reference):
        page = posixpath.normpath(f"../docs/{link['refuri']}")
        link["refuri"] = re.sub(r"\.(md|ipynb)\b", ".html", page)
        link["target"] = "_blank"


def add_timings(app, doctree):
    """Give each slide the seconds from its note's minute to the next note's."""
    minutes = [60 * int(hour) + int(minute)
               for hour, minute in re.findall(r"^(\d):(\d\d)\. ", doctree.astext(), re.M)]
    ends = [*minutes[1:], 240]
    for slide, start, end in zip(doctree.findall(nodes.section), minutes, ends, strict=True):
        slide += revealjs_section("", **{"data-timing": 60 * (end - start)})


def setup(app):
    app.connect("doctree-read", link_to_site)
    app.connect("doctree-read", add_timings)
