"""Run read_data.py repeatedly in the same ranks: `python readers_in_turn.py READ_DATA JSON`.

Each case replaces one piece of it and has other flags. This saves starting ranks each time.
"""

import json
import sys
from contextlib import suppress
from pathlib import Path

source, cases = sys.argv[1], json.loads(sys.argv[2])
text = Path(source).read_text()
for old, new, flags in cases:
    assert text.count(old) == 1 or not old, old
    module = {"__name__": "read_data", "__file__": source}
    exec(compile(text.replace(old, new) if old else text, source, "exec"), module)
    sys.argv = ["read_data.py", *flags]
    with suppress(SystemExit):
        module["main"]()
