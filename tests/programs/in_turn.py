"""A chapter's main() on one rank with several rows of flags: `python in_turn.py MAIN JSON`.

Prints for each the message with which it exits, or null.
"""

import contextlib
import importlib
import io
import json
import sys
from pathlib import Path

chapter = importlib.import_module(Path(sys.argv[1]).stem)
rows = json.loads(sys.argv[2])
for flags in rows:
    sys.argv = [sys.argv[1], *flags.split()]
    message, errors = None, io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            chapter.main()
    except SystemExit as end:
        message = end.code if isinstance(end.code, str) else errors.getvalue().strip()
    print("end:", json.dumps(message), file=sys.stderr)
