"""A set-up that installs nothing, and ends once FILE exists: `python short_set_up.py VENV FILE`."""

import sys

import setup  # tools/environment's

go = sys.argv.pop()


def make(venv, packages):
    with open(f"{venv}.log", "a") as file:
        file.write("made\n")
    setup.step("begins")
    loop = f"echo $$ > '{venv}.pid'; while [ ! -e '{go}' ]; do sleep 0.05; done"
    setup.run(["sh", "-c", loop], "")
    (venv / setup.STAMP).write_text("\n".join(setup.stamp(venv)))


setup.make = make
sys.argv.insert(1, "--venv")
setup.main()
