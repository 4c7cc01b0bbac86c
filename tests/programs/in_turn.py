"""Run a chapter's main() on one rank with several rows of flags: `python in_turn.py MAIN JSON`.

Prints the exit message of each, or null.
"""

import contextlib
import importlib
import json
import sys
import tempfile
from pathlib import Path

chapter = importlib.import_module(Path(sys.argv[1]).stem)
rows = json.loads(sys.argv[2])
for flags in rows:
    sys.argv = [sys.argv[1], *flags.split()]
    message = None
    with tempfile.TemporaryFile("w+") as errors:
        try:
            with contextlib.redirect_stderr(errors):
                chapter.main()
        except SystemExit as end:
            errors.seek(0)
            message = end.code if isinstance(end.code, str) else errors.read().strip()
    print("end:", json.dumps(message), file=sys.stderr)
