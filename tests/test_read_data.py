"""Every way to read delivers the same bytes, each image once an epoch, and a way that does not is noticed."""

import json
import re
import sys
from types import SimpleNamespace

import numpy as np
import pandas
import pytest
from conftest import BIN, PROGRAMS, ROOT, execute, lines, load_module

from tools.measuring import reading

SOURCE = ROOT / "reading_data" / "read_data.py"
SIZE, IMAGES = 3072, 512


def command(ranks, *words):
    return [BIN / "mpiexec", "-n", ranks, sys.executable, *words]


def in_turn(ranks, folder, cases, **options):
    """Cases are (old, new, flags). Returns what was printed, and an array (ranks, images, bytes) for each case."""
    words = command(ranks, PROGRAMS / "readers_in_turn.py", SOURCE, folder, json.dumps(cases))
    done = execute(words, timeout=60, **options)
    assert done.code == 0, done.err
    read = [np.stack([np.load(folder / f"{number}-{rank}.npy").reshape(-1, SIZE) for rank in range(ranks)])
            if (folder / f"{number}-0.npy").exists() else None for number in range(len(cases))]
    return SimpleNamespace(out=done.out, err=done.err, read=read)


def flags(folder, way, images=IMAGES):
    return ["--way", way, "--images", str(images), "--folder", str(folder / "images"),
            "--results", str(folder / "results")]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_way_delivers_the_same_bytes_and_each_image_once(ranks, tmp_path):
    done = in_turn(ranks, tmp_path, [("", "", flags(tmp_path, way)) for way in reading.WAYS])
    whole = np.fromfile(tmp_path / "images" / "images.bin", np.uint8).reshape(IMAGES, SIZE)
    for read in done.read:
        assert np.array_equal(read, done.read[0])
        assert sorted(image.tobytes() for image in read.reshape(-1, SIZE)) == sorted(map(bytes, whole))
    assert not np.array_equal(done.read[0].reshape(-1, SIZE), whole)  # shuffled
    records = lines(tmp_path / "results")
    assert [found["way"] for found in records] == list(reading.WAYS)
    assert len({found["checksum"] for found in records}) == 1
    for found in records:
        assert (found["ranks"], found["nodes"], found["images"]) == (ranks, 1, IMAGES)
        excess = found["warm_read_bytes"] - whole.nbytes  # beside the images, only a look at the counter
        assert excess > whole.nbytes / 2 if found["way"] == "mpi-io-default" else 0 <= excess < 4000, found["way"]


def test_readers_serve_each_its_own_node(tmp_path):
    """MPICH takes even and odd ranks for two nodes."""
    in_turn(4, tmp_path, [("", "", flags(tmp_path, way)) for way in ("files", "readers")],
            env={"MPIR_CVAR_NUM_CLIQUES": "2"})
    one, other = lines(tmp_path / "results")
    assert other["nodes"] == 2 and other["checksum"] == one["checksum"]


def test_what_is_wrong_is_noticed(tmp_path):
    once, place = "not each image once", "not where the order says"
    cases = [("readers", "order[member, step]", "order[0, step]", once),  # all ranks get the batch of one
             ("readers", "zip(members, batches)", "zip(members[::-1], batches)", place),
             ("mpi-io", "[into[step], 1, in_memory]", "into[step]", place),
             ("mpi-io", "range(len(into))", "range(len(into) - 1)", once),
             ("files", "of-{ranks}.bin", "of-{ranks}{'' if world.rank else 'x'}.bin", ""),  # sound: other names
             ("files", "part = images[world.rank::ranks]", "part = images[0::ranks]", once),  # with rank 0's images
             ("preloaded", "images, places = np.fromfile(path", "images, places = np.fromfile(str(path).replace("
              "'images-1', 'images-0')", once)]
    done = in_turn(2, tmp_path, [(old, new, [*flags(tmp_path, way)[:4], "--folder", str(tmp_path / f"{number}")])
                                 for number, (way, old, new, _) in enumerate(cases)])
    said = [message for *_, message in cases if message]
    assert len(done.err.splitlines()) == len(said), done.err
    for line, message in zip(done.err.splitlines(), said):
        assert message in line
    assert done.out.count(" 2\n") == len(said)


def test_files_that_changed_are_noticed(tmp_path):
    start = command(2, SOURCE, *flags(tmp_path, "files"))
    assert execute(start, timeout=60).code == 0
    with open(tmp_path / "images" / "images-1-of-2.bin", "r+b") as file:
        first = file.read(1)[0]
        file.seek(0)
        file.write(bytes([first ^ 1]))  # one bit
    done = execute(start, timeout=60)
    assert done.code == 2 and re.fullmatch("read_data.py: .*not each image once.*\n", done.err), done.err
    assert len(lines(tmp_path / "results")) == 1  # the first run's


def test_mistakes_are_one_line(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "images.bin").write_bytes(b"another program's")
    cases = {"--way tape": "--way.*tape", "--way files --images 64": "--images.*multiple of 128",
             "--way files --images many": "--images.*many", "": "required: --way",
             "--way files --results /none/results": "cannot write /none/results",
             f"--way files --folder {tmp_path / 'file' / 'in'}": "cannot write the images into --folder.*/file/in",
             f"--way mpi-io --folder {tmp_path / 'images'}": "images.bin has 17 bytes"}
    done = in_turn(2, tmp_path, [("", "", words.split()) for words in cases])
    assert len(done.err.splitlines()) == len(cases), done.err
    for line, said in zip(done.err.splitlines(), cases.values()):
        assert re.fullmatch(f"read_data.py: .*{said}.*", line)
    assert (tmp_path / "images" / "images.bin").read_bytes() == b"another program's"


def test_a_mistake_s_code_is_2_for_the_launcher(tmp_path):
    (tmp_path / "file").touch()
    done = execute(command(2, SOURCE, "--way", "files", "--folder", tmp_path / "file" / "in"), timeout=60)
    assert done.code == 2 and re.fullmatch("read_data.py: cannot write.*\n", done.err), done.err


def test_when_one_rank_fails_all_end(tmp_path):
    main = tmp_path / "read_data.py"
    text = SOURCE.read_text()
    line = "    images, places = np.fromfile(path"
    assert text.count(line) == 1
    main.write_text(text.replace(line, f"    world.rank and os.remove(path)\n{line}"))
    done = execute(command(2, main, *flags(tmp_path, "preloaded")), timeout=60)
    assert done.code != 0 and "FileNotFoundError" in done.err and not (tmp_path / "results").read_text()


def test_the_study_names_every_way_and_ends_with_a_run_that_fails(tmp_path, monkeypatch):
    assert load_module(SOURCE).WAYS.keys() == set(reading.WAYS)
    (tmp_path / "file").touch()
    monkeypatch.setattr(reading, "refusal", lambda path: None)
    monkeypatch.setattr(reading, "RECORDS", tmp_path / "r.jsonl")
    monkeypatch.setattr(sys, "argv", ["reading.py", "--folder", str(tmp_path / "file" / "in")])
    with pytest.raises(SystemExit, match=r"^files, 1, 0, .*: exit code 2\nread_data.py: cannot write"):
        reading.main()


def test_the_committed_study_is_whole_and_drawn():
    records = pandas.read_json(reading.RECORDS, lines=True, dtype={"checksum": str})
    runs = records.groupby(["way", "ranks"]).size()
    assert set(runs) == {reading.REPEATS} and len(runs) == len(reading.WAYS) * len(reading.RANKS)
    assert set(records.groupby("ranks")["checksum"].nunique()) == {1}
    assert records["host"].nunique() == 1
    found = {tuple(line.split()[:2]) for line in reading.table(records).splitlines()[4:]}
    assert found == {(way, str(ranks)) for way in reading.WAYS for ranks in reading.RANKS}
    axes = reading.draw(records).axes
    assert [label.get_text() for label in axes[0].get_yticklabels()] == list(reading.WAYS)
    assert [axis.get_title("left") for axis in axes] == ["1 rank", "2 ranks", "4 ranks"]
