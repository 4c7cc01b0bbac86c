"""Write into requirements.txt what its direct pins bring along: `make pins`, after one of those has moved.

pip resolves the direct pins of an environment with and without the tests, and installs nothing. What torch brings for
CUDA alone is left out: a CPU build of it brings none, and torch says the versions itself.
"""

import json
import re
import sys
import tempfile
from pathlib import Path

import environment

HEADING = "\n# What these bring along: `make pins`\n"
CUDA = re.compile("nvidia-|cuda-|triton$")


def brought_along(direct: list[str]) -> dict[str, str]:
    """The packages that pip would install for the direct pins, and their versions, without the direct ones."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, report = Path(folder, "wanted.txt"), Path(folder, "report.json")
        wanted.write_text("\n".join(direct))
        environment.run([sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed",
                         "--disable-pip-version-check", "--use-pep517", "--report", report, "-r", wanted],
                        "requirements.txt is as it was. Mend what pip says of its direct pins, and run it again")
        resolved = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    found = {re.sub("[-_.]+", "-", each["name"]).lower(): each["version"].partition("+")[0] for each in resolved}
    given = {re.split("==|;", pin)[0] for pin in direct}
    return {name: version for name, version in found.items() if name not in given and not CUDA.match(name)}


def main():
    head, found, _ = environment.REQUIREMENTS.read_text().partition(HEADING)
    if not found:
        environment.fail(f"{environment.REQUIREMENTS} has no line {HEADING.strip()!r}, below which it is to be written")
    pins = [line for line in head.splitlines() if "==" in line]
    tests = [pin.partition(";")[0] for pin in pins if 'extra == "tests"' in pin]
    always = [pin.replace('; extra == "built"', "") for pin in pins
              if 'extra == "tests"' not in pin and 'extra == "apart"' not in pin]
    ours = brought_along(always)
    every = brought_along(always + tests)
    changed = sorted(name for name in ours if every.get(name, ours[name]) != ours[name])
    if changed:
        environment.fail(f"with the tests these are of other versions than without: {', '.join(changed)}")
    lines = [f"{name}=={version}" + ("" if name in ours else '; extra == "tests"') for name, version in every.items()]
    environment.REQUIREMENTS.write_text(head + HEADING + "".join(f"{line}\n" for line in sorted(lines)))
    environment.step(f"{len(lines)} pins written; make setup installs them")


if __name__ == "__main__":
    main()
