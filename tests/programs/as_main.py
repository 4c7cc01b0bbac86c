"""`python PROGRAM FLAGS` for many rows of flags in one process: importing takes the time.

    python as_main.py PROGRAM ROWS ANSWERS

PROGRAM: a path, or a module's name as for `python -m`. ROWS: a JSON file of [[flags, variables, files], ...]: variables
are set on top of this process's, files are {path: text} to write before, or to remove where the text is null.
ANSWERS gets a JSON line for each row when it ends: its exit code, output and errors.
"""

import json
import os
import runpy
import sys
import tempfile
import traceback
from pathlib import Path


def code_of(program):
    """Run it. Returns what its process would exit with."""
    try:
        if program.endswith(".py"):
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        if (dist := sys.modules.get("torch.distributed")) and dist.is_initialized():
            dist.destroy_process_group()  # the next row makes its own
    return 0


def printed(out, err, program):
    """Run it with its output in these files. Returns its code."""
    own = [os.dup(1), os.dup(2)]
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    code = code_of(program)
    sys.stdout.flush()
    sys.stderr.flush()
    for number, original in zip((1, 2), own):
        os.dup2(original, number)
        os.close(original)
    return code


def text_of(file):
    file.seek(0)
    return file.read().decode(errors="surrogateescape")


program, rows, answers = sys.argv[1:]
place = str(Path(program).parent) if program.endswith(".py") else os.getcwd()
environment, hook = dict(os.environ), sys.excepthook
for flags, variables, files in json.loads(Path(rows).read_text()):
    print("row:", ascii(flags), variables, file=sys.stderr, flush=True)  # the last one has hung, or ended the process
    for path, text in files.items():
        Path(path).unlink(missing_ok=True)
        if text is not None:
            Path(path).write_text(text, errors="surrogateescape")
    os.environ.clear()
    os.environ.update(environment | variables)
    sys.argv, sys.path[0], sys.excepthook = [program, *flags], place, hook
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        code = printed(out, err, program)
        answer = code, text_of(out), text_of(err)
    with open(answers, "a") as file:
        file.write(json.dumps(answer) + "\n")
