"""Configure the site of all pages and notebooks. `make site` builds it; it needs no network."""

import json
import subprocess
from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.addnodes import download_reference

from tools.pages import plan

ROOT = Path(__file__).resolve().parent.parent
SECTIONS = {
    "The day": ["0*/README", "exercises/README", "submit/README", "cluster/README",
                "agree/README", "agree/WHAT_AGREE_SAYS", "submit/NEW_SITE",
                "docs/WHAT_GOES_WRONG"],
    "To look up": ["docs/SHEET", "docs/PLAN", "docs/GLOSSARY", "docs/DEMO", "docs/SETUP",
                   "docs/COLAB", "docs/PARALLELISM", "reading_data/README", "docs/SOURCES",
                   "docs/TEACHING", "Slides, with notes <docs/slides>", "docs/FEEDBACK",
                   "CONTRIBUTING"]}
SUBPAGES = {
    "01_single_node/README": ["batch_size"],
    "03_ddp/README": ["allreduce", "YOUR_SCRIPT", "YOUR_SCRIPT_TRAPS", "FRAMEWORKS", "scaling",
                      "model_vs_data_parallelism", "cost_model"],
    "05_zero/README": ["memory", "TWO_D", "YOUR_SCRIPT", "MEASUREMENTS"],
    "exercises/README": ["[1-9]_*/README", "1[0-9]_*/README"],
    "cluster/README": ["LAB"]}

LANGUAGES = {".py": "python", ".sh": "bash", ".pbs": "bash", ".slurm": "bash", ".json": "json"}
CODE_PAGES = {}  # {page: file} of the files that pages link

RECORDING = """\
In two minutes: the demo, [agree](agree/README.md) on a script with a mistake,
[footprint](cluster/README.md#footprint), and [plan](cluster/README.md#what-it-will-cost).
[cast.py](tools/pages/cast.py) recorded these runs; waiting is cut short.

```{asciinema} assets/records/tour.cast
:fit: width
:poster: npt:1:05
```
"""

project = html_title = "Scaling Deep Learning"
extensions = ["myst_nb", "sphinx_copybutton", "sphinxcontrib.asciinema"]
root_doc = "README"
# Only files that git tracks: a reader's own notes are not pages.
include_patterns = subprocess.run(["git", "ls-files", "[!.]*.md", "*.ipynb"], cwd=ROOT, text=True,
                                  capture_output=True).stdout.split()
html_theme = "furo"
html_theme_options = {
    "dark_css_variables": {"picture-brightness": "0.85"},    # for site.css
    "source_repository": "https://github.com/YOUR-ORGANISATION/scaling-deep-learning",
    "source_branch": "main", "source_directory": "",
    "top_of_page_buttons": ["view"]}
highlight_language = "text"    # of a fence that names no language
html_static_path = html_css_files = ["site.css"]
html_search_scorer = str(ROOT / "docs" / "search.js")
html_copy_source = html_show_copyright = False
html_math_renderer = "mathml"
myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath", "html_image"]
nb_execution_mode = "off"
nb_ipywidgets_js = {}
nb_mime_priority_overrides = [("html", "application/vnd.jupyter.widget-view+json", None)]


def toctree(pages, caption=""):
    options = [":hidden:", ":glob:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["", "```{toctree}", *options, "", *pages, "```", ""])


def prepare_page(app, name, source):
    """Fold the cells that Jupyter folds; add contents, the recording, and the planner's form."""
    text = source[0]
    if text.startswith("{"):
        notebook = json.loads(text)
        for cell in notebook["cells"]:
            if cell["metadata"].get("jupyter", {}).get("source_hidden"):
                cell["metadata"].setdefault("tags", []).append("hide-input")
        source[0] = json.dumps(notebook)
        return
    if name == root_doc:
        text = text.replace("<!-- recording -->", RECORDING)
        text += "".join(toctree(pages, caption) for caption, pages in SECTIONS.items())
    if name in SUBPAGES:
        text += toctree(SUBPAGES[name])
    if name == "docs/PLAN":
        text = text.replace("<!-- plan -->", f"`````{{raw}} html\n{plan.page()}`````")
    source[0] = text


def visit_math(self, node):
    self.body.append(tex2mathml(node.astext(), as_block=isinstance(node, nodes.math_block)))
    raise nodes.SkipNode


def link_to_code(app, doctree, page):
    """Let a link to a source file open a page that shows the file, not download it."""
    for link in list(doctree.findall(download_reference)):
        path = (ROOT / page).parent.joinpath(link["reftarget"]).resolve().relative_to(ROOT)
        CODE_PAGES[f"code/{path}"] = path
        uri = app.builder.get_relative_uri(page, f"code/{path}")
        link.replace_self(nodes.reference("", "", *link.children, refuri=uri, internal=True))


def make_code_pages(app):
    for name, path in CODE_PAGES.items():
        code = app.builder.highlighter.highlight_block(
            (ROOT / path).read_text(), LANGUAGES.get(path.suffix, "text"))
        yield name, {"title": str(path), "body": f"<h1>{path}</h1>{code}"}, "page.html"


def setup(app):
    app.connect("doctree-resolved", link_to_code)
    app.connect("html-collect-pages", make_code_pages)
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math, None))
    app.connect("source-read", prepare_page)
