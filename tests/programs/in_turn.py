"""Run a chapter's main() on one rank for each row of flags: `python in_turn.py MAIN JSON`.

For each row, print its exit message, or null if there is none, after "end: ".
"""

import contextlib
import importlib
import json
import sys
import tempfile
from pathlib import Path

main_file = sys.argv[1]
chapter = importlib.import_module(Path(main_file).stem)
rows = json.loads(sys.argv[2])
for flags in rows:
    sys.argv = [main_file, *flags.split()]
    message = None
    with tempfile.TemporaryFile("w+") as errors:
        try:
            with contextlib.redirect_stderr(errors):
                chapter.main()
        except SystemExit as system_exit:
            errors.seek(0)
            message = system_exit.code
            if not isinstance(message, str):
                message = errors.read().strip()
    print("end:", json.dumps(message), file=sys.stderr)
