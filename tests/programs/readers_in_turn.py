"""Run cases of read_data.py in the same ranks: `python readers_in_turn.py READ_DATA JSON`.

A case is [old text, new text, flags]; an empty old text changes nothing. Only the first case has to
start ranks.
"""

import json
import sys
from contextlib import suppress
from pathlib import Path

path, cases = sys.argv[1], json.loads(sys.argv[2])
source = Path(path).read_text()
for old, new, flags in cases:
    changed_source = source
    if old:
        assert source.count(old) == 1, old
        changed_source = source.replace(old, new)
    module = {"__name__": "read_data", "__file__": path}
    exec(compile(changed_source, path, "exec"), module)
    sys.argv = ["read_data.py", *flags]
    with suppress(SystemExit):
        module["main"]()
