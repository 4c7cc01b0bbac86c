"""The site: the pages and notebooks of this repository as they are, in the order of a day. `make site` builds it.

Nothing is fetched when it is read: fonts are the reader's own, formulae are MathML, sliders show their first state.
"""

import json
import os
import re
import subprocess
from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

ROOT = Path(__file__).resolve().parent.parent
# What git knows: a reader's own notes in a chapter's folder are no page.
listed = subprocess.run(["git", "ls-files", "*.md", "*.ipynb"], cwd=ROOT, capture_output=True, text=True).stdout.split()
LESSONS = {  # a program: the one that it grows from; those of later chapters as their pages say
    "01_single_node/main.py": None, "01_single_node/main_tf.py": None, "01_single_node/ranks.py": None,
    "01_single_node/workshop.py": None, "03_ddp/your_script.py": None,
    "03_ddp/your_script_ddp.py": "03_ddp/your_script.py", "05_zero/fsdp.py": "05_zero/main.py",
    **{new: old for page in listed if page.endswith("/README.md")
       for old, new in re.findall(r"<!-- diff (\S+) (\S+) -->", (ROOT / page).read_text())}}
PARTS = {
    "The day": ["0*/README", "exercises/README", "submit/README", "03_ddp/YOUR_SCRIPT", "submit/AGREE",
                "docs/WHAT_GOES_WRONG"],
    "To look up": ["docs/GLOSSARY", "docs/DEMO", "docs/SETUP", "docs/PARALLELISM", "reading_data/README",
                   "docs/SOURCES", "docs/TEACHING", "CONTRIBUTING"]}
BELOW = {  # and below a chapter its programs
    "01_single_node/README": ["batch_size"],
    "02_horovod/README": ["allreduce", "pytorch/README", "tensorflow/README"],
    "03_ddp/README": ["model_vs_data_parallelism", "scaling", "cost_model", "AT_SCALE", "SLOW_LINK"],
    "05_zero/README": ["memory", "MEASUREMENTS"],
    "exercises/README": ["[1-9]_*/README", "10_*/README"],
    "submit/README": ["LAB"]}

project = html_title = "Scaling Deep Learning"
extensions = ["myst_nb", "sphinx_copybutton", "sphinx_design"]
root_doc = "README"
include_patterns = [*(name for name in listed if not name.startswith(".")), "docs/lessons/*"]
html_theme = "furo"
html_static_path = html_css_files = ["site.css"]
html_copy_source = html_show_copyright = False
html_math_renderer = "mathml"
myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath", "colon_fence", "html_image"]
nb_execution_mode = "off"
nb_ipywidgets_js = {}
nb_mime_priority_overrides = [("html", "application/vnd.jupyter.widget-view+json", None)]


def page_of(lesson):
    return f"docs/lessons/{lesson.removesuffix('.py').replace('/', '_')}.md"


def write_lessons(app):
    """A page for each program, with the numbers of its lines."""
    (ROOT / "docs" / "lessons").mkdir(exist_ok=True)
    for lesson, base in LESSONS.items():
        page = f"# {lesson}\n\n```{{literalinclude}} ../../{lesson}\n:linenos:\n```\n"
        if base:
            readme = f"../../{Path(lesson).parent}/README.md"
            page = page.replace("\n\n", f"\n\nIt is [{base}](../../{base}) with [some lines changed]({readme}).\n\n", 1)
        (ROOT / page_of(lesson)).write_text(page)


def toctree(pages, caption=""):
    options = [":hidden:", ":glob:", f":caption: {caption}"] if caption else [":hidden:", ":glob:"]
    return "\n".join(["", "```{toctree}", *options, "", *pages, "```", ""])


def prepare(app, name, source):
    """What the site adds to a page: where one goes on, each reason beside its part of the diff, folded cells."""
    if source[0].startswith("{"):
        notebook = json.loads(source[0])
        notebook["metadata"]["language_info"]["pygments_lexer"] = "ipython3"
        for cell in notebook["cells"]:
            if cell["metadata"].get("jupyter", {}).get("source_hidden"):
                cell["metadata"].setdefault("tags", []).append("hide-input")
        source[0] = json.dumps(notebook)
        return
    folder = Path(name).parent

    def to_its_page(link):
        lesson = os.path.normpath(folder / link[1])
        if Path(lesson).name in ("ranks.py", "workshop.py"):
            lesson = f"01_single_node/{Path(lesson).name}"
        return f"]({os.path.relpath(page_of(lesson), folder)})" if lesson in LESSONS else link[0]

    text = re.sub(r"\]\(([\w./]+\.py)\)", to_its_page, source[0])
    if name == root_doc:
        text += "".join(toctree(pages, caption) for caption, pages in PARTS.items())
    programs = [f"../docs/lessons/{name[:3]}*"] if re.match(r"\d\d_\w+/README$", name) else []
    below = [*BELOW.get(name, []), *programs]
    text += toctree(below) if below else ""
    reason, hunk = r"^((?:.+\n)+)\n", r"<!-- hunk: .* -->\n(```diff\n(?:(?!```).*\n)*```)\n"
    beside = ("::::{grid} 1 1 1 2\n:::{grid-item}\n:columns: 12 12 12 4\n\\1:::\n"
              ":::{grid-item}\n:columns: 12 12 12 8\n\\2\n:::\n::::\n")
    source[0] = re.sub(reason + hunk, beside, text, flags=re.M)


def visit_math(self, node):
    self.body.append(tex2mathml(node.astext(), as_block=isinstance(node, nodes.math_block)))
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math, None))
    app.connect("builder-inited", write_lessons)
    app.connect("source-read", prepare)
