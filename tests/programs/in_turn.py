"""A chapter's main() on one rank with several rows of flags in turn: `python in_turn.py MAIN JSON`."""

import importlib.util
import json
import sys
from pathlib import Path

main, rows = sys.argv[1], json.loads(sys.argv[2])
sys.path[0] = str(Path(main).parent)
sys.argv = [main]
spec = importlib.util.spec_from_file_location("chapter", main)
chapter = importlib.util.module_from_spec(spec)
spec.loader.exec_module(chapter)
for flags in rows:
    sys.argv[1:] = flags.split()
    end = None
    try:
        chapter.main()
    except SystemExit as problem:
        end = problem.code
    print("end:", json.dumps(end), file=sys.stderr)
