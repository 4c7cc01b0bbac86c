"""A chapter's main() on one rank with several rows of flags: `python in_turn.py MAIN JSON`."""

import importlib
import json
import sys
from pathlib import Path

chapter = importlib.import_module(Path(sys.argv[1]).stem)
rows = json.loads(sys.argv[2])
for flags in rows:
    sys.argv = [sys.argv[1], *flags.split()]
    end = None
    try:
        chapter.main()
    except SystemExit as problem:
        end = problem.code
    print("end:", json.dumps(end), file=sys.stderr)
