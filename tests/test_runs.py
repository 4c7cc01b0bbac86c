"""Studies are killed at any moment and started again: each run is done once, and what is published is whole."""

import json
import sys

import pytest
import runs
from conftest import PROGRAMS, ROOT, execute, lines

from tools.measuring import reading

STUDIES = ("zero", "rounding", "allreduce", "reading")


def start(program, folder, kill_at):
    killed = PROGRAMS / ("killed_bench.py" if program == "bench" else "killed_study.py")
    return execute([sys.executable, killed, program, folder, kill_at], cwd=ROOT, timeout=120)


@pytest.mark.parametrize("program", [*STUDIES, "bench"])
def test_a_killed_study_goes_on_where_it_was(program, tmp_path):
    assert start(program, tmp_path, 3).code == -9
    part, = tmp_path.glob("**/*.part")
    assert len(lines(part)) == 2  # on disk when they were done
    part.write_text(part.read_text() + '{"run": {')  # and a third, cut off
    done = start(program, tmp_path, 0)
    assert done.code == 0 and "2 runs are in" in done.err, done.err
    begun = (tmp_path / "begun").read_text().splitlines()
    whole, = tmp_path.glob("**/*.jsonl")
    assert not part.exists()
    if program == "bench":
        assert len(begun) == 1 + len(lines(whole))
    else:
        assert len(begun) == 1 + len(set(begun))  # the one in which it was killed twice, the others once
        name = {"reading": "read_data"}.get(program, program)
        assert lines(whole) == lines(ROOT / "assets" / "records" / f"{name}.jsonl")


def test_what_other_code_or_another_machine_has_done_is_not_gone_on_with(tmp_path, capsys):
    first = runs.Runs(tmp_path / "r.part")
    assert first.once({"a": 1}, lambda: {"b": 2}) == {"b": 2}
    assert runs.Runs(tmp_path / "r.part").once({"a": 1}, lambda: 1 / 0) == {"b": 2}
    line, = lines(tmp_path / "r.part")
    for number, name in enumerate(first.here):  # the commit, the machine, the code itself
        (tmp_path / "r.part").write_text(json.dumps(line | {"here": line["here"] | {name: "another"}}))
        assert runs.Runs(tmp_path / "r.part").once({"a": 1}, lambda number=number: number) == number
        assert "begun again" in capsys.readouterr().err


def test_a_study_whose_check_fails_publishes_nothing_and_keeps_its_runs(tmp_path):
    def check(records):
        raise RuntimeError(records)

    (tmp_path / "r.jsonl").write_text("before\n")
    with pytest.raises(RuntimeError):
        runs.study(tmp_path / "r.jsonl", [{"a": 1}], lambda a: {"a": a}, check)
    assert (tmp_path / "r.jsonl").read_text() == "before\n" and len(lines(tmp_path / "r.jsonl.part")) == 1
    assert reading.check([{"ranks": 1, "checksum": "a", "way": "x"}] * 2) is None
    with pytest.raises(RuntimeError, match="not deliver the same bytes"):
        reading.check([{"ranks": 1, "checksum": name, "way": "x"} for name in "ab"])


def test_a_line_that_was_cut_off_takes_no_other_along(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text('{"a": 1}\n{"a": ')
    runs.append(path, {"a": 3})
    assert runs.read(path) == [{"a": 1}, {"a": 3}]
    path.write_bytes(b'[]\n7\nnull\n\xff\xfe\n{"a": 4}\n')  # somebody else's file
    assert runs.read(path) == [{"a": 4}]


def test_a_run_that_fails_ends_the_study_with_what_it_printed(tmp_path):
    source = ("import sys; sys.path.append('submit'); import runs, subprocess; "
              "runs.study(sys.argv[1], [{'n': 7}], lambda n: "
              "subprocess.run(['sh', '-c', 'echo no such thing; exit 3'], check=True, text=True, stdout=-1))")
    done = execute([sys.executable, "-c", source, tmp_path / "r.jsonl"], cwd=ROOT)
    assert done.code == 1 and done.err.splitlines()[-2:] == ["7: exit code 3", "no such thing"], done.err
    assert not (tmp_path / "r.jsonl").exists()
