"""Studies are killed at any moment and started again: each run is done once, and what is published is whole."""

import json
import sys

import pytest
import runs
from conftest import ROOT, execute, lines

STUDY = """
import os, pathlib, signal, sys
sys.path.append("submit")
import runs

folder, kill_at = pathlib.Path(sys.argv[1]), int(sys.argv[2])
def do(n):
    runs.append(folder / "begun", {"n": n})
    if n == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"n": n}

runs.study(folder / "r.jsonl", [{"n": n} for n in (1, 2, 3, 4)], do)
"""


@pytest.mark.fault
def test_a_killed_study_goes_on_where_it_was(tmp_path):
    study = [sys.executable, "-c", STUDY, tmp_path]
    assert execute([*study, 3], cwd=ROOT).code == -9
    part = tmp_path / "r.jsonl.part"
    assert len(lines(part)) == 2  # on disk when they were done
    part.write_text(part.read_text() + '{"run": {')  # and a third, cut off
    done = execute([*study, 0], cwd=ROOT)
    assert done.code == 0 and "2 runs are in" in done.err, done.err
    assert [line["n"] for line in lines(tmp_path / "begun")] == [1, 2, 3, 3, 4]
    assert [line["n"] for line in lines(tmp_path / "r.jsonl")] == [1, 2, 3, 4] and not part.exists()


@pytest.mark.check
def test_what_other_code_or_another_machine_has_done_is_not_gone_on_with(tmp_path, capsys):
    first = runs.Runs(tmp_path / "r.part")
    assert first.once({"a": 1}, lambda: {"b": 2}) == {"b": 2}
    assert runs.Runs(tmp_path / "r.part").once({"a": 1}, lambda: 1 / 0) == {"b": 2}
    line, = lines(tmp_path / "r.part")
    for number, name in enumerate(("git", "host", "code")):
        (tmp_path / "r.part").write_text(json.dumps(line | {"here": line["here"] | {name: "another"}}))
        assert runs.Runs(tmp_path / "r.part").once({"a": 1}, lambda number=number: number) == number
        assert "begun again" in capsys.readouterr().err
