"""The repository's address. pyproject.toml has it; `make docs` writes it into the other files."""

import re
import tomllib

from cluster.launch import ROOT

URL = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["repository"]
if not URL.startswith("https://github.com/"):
    raise SystemExit(f"pyproject.toml: {URL} is not on GitHub, as the links to Colab need")
NAME = URL.removeprefix("https://github.com/")  # OWNER/REPOSITORY
PLACES = re.compile(  # the second group is the name
    r"(git clone [-\w ]*https://github\.com/|repository-code: \"https://github\.com/"
    r"|codespaces\.new/|colab\.research\.google\.com/github/)([\w.-]+/[\w.-]+)")
