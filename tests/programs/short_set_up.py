"""A set-up that installs nothing, and ends when a file is there: `python short_set_up.py TOOLS VENV FILE`."""

import sys

sys.path[0] = sys.argv.pop(1)
import setup  # noqa: E402

go = sys.argv.pop()


def make(venv, packages):
    with open(f"{venv}.log", "a") as file:
        file.write("made\n")
    setup.step("begins")
    setup.run(["sh", "-c", f"echo $$ > '{venv}.pid'; while [ ! -e '{go}' ]; do sleep 0.05; done"], "")
    (venv / setup.STAMP).write_text("\n".join(setup.stamp(venv)))


setup.make = make
sys.argv.insert(1, "--venv")
setup.main()
