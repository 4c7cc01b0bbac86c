"""All ways to read deliver the same bytes, each image once per epoch; faults are detected."""

import json
import re
import sys

from conftest import BIN, PROGRAMS, ROOT, execute, lines, load_module

SOURCE = ROOT / "reading_data" / "read_data.py"
WAYS = list(load_module(SOURCE).WAYS)
SIZE, IMAGES = 3072, 512


def command(ranks, *words):
    return [BIN / "mpiexec", "-n", ranks, sys.executable, *words]


def run_cases(ranks, cases, **options):
    """Run cases (old text, new text, flags). Return the error lines."""
    words = command(ranks, PROGRAMS / "readers_in_turn.py", SOURCE, json.dumps(cases))
    done = execute(words, timeout=60, **options)
    assert done.code == 0, done.err
    return done.err.splitlines()


def flags(folder, way):
    return ["--way", way, "--images", str(IMAGES), "--folder", str(folder / "images"),
            "--results", str(folder / "results")]


def test_every_way_delivers_the_same_bytes_and_each_image_once(tmp_path):
    assert run_cases(2, [("", "", flags(tmp_path, way)) for way in WAYS]) == []
    records = lines(tmp_path / "results")
    assert [record["way"] for record in records] == WAYS
    assert len({record["checksum"] for record in records}) == 1
    for record in records:
        assert (record["ranks"], record["nodes"], record["images"]) == (2, 1, IMAGES)
        excess = record["warm_read_bytes"] - SIZE * IMAGES
        if record["way"] == "mpi-io-default":
            assert excess > SIZE * IMAGES / 2
        else:  # besides the images, only reading the counter
            assert 0 <= excess < 4000, record["way"]


def test_readers_serve_each_its_own_node(tmp_path):
    """MPICH treats even and odd ranks as two nodes."""
    run_cases(4, [("", "", flags(tmp_path, way)) for way in ("files", "readers")],
            env={"MPIR_CVAR_NUM_CLIQUES": "2"})
    files, readers = lines(tmp_path / "results")
    assert readers["nodes"] == 2 and readers["checksum"] == files["checksum"]


def test_what_is_wrong_is_noticed(tmp_path):
    once, place = "missing, duplicated or damaged", "by the wrong rank or in the wrong order"
    cases = [("readers", "order[member, step]", "order[0, step]", once),  # all ranks get one batch
             ("readers", "zip(members, batches)", "zip(members[::-1], batches)", place),
             ("mpi-io", "[buffer[step], 1, in_memory]", "buffer[step]", place),
             ("files", "images[world.rank::ranks]", "images[0::ranks]", once)]  # rank 0's images
    changes = [(old, new, [*flags(tmp_path, way)[:4], "--folder", str(tmp_path / f"{number}")])
               for number, (way, old, new, _) in enumerate(cases)]
    messages = run_cases(2, changes)
    assert len(messages) == len(cases), messages
    assert all(expected in message for message, (*_, expected) in zip(messages, cases))


def test_mistakes_are_one_line(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "images.bin").write_bytes(b"another program's")
    cases = {"--way tape": "--way.*tape", "--way files --images 64": "--images.*multiple of 128",
             "--way files --results /none/results": "cannot write /none/results",
             f"--way mpi-io --folder {tmp_path / 'images'}": "images.bin has 17 bytes"}
    messages = run_cases(2, [("", "", words.split()) for words in cases])
    assert len(messages) == len(cases), messages
    for message, expected in zip(messages, cases.values()):
        assert re.fullmatch(f"read_data.py: .*{expected}.*", message)
    assert (tmp_path / "images" / "images.bin").read_bytes() == b"another program's"


def test_a_dataloader_reads_hdf5_on_two_ranks_with_workers(tmp_path):
    """The program itself checks that every image is read once."""
    words = command(2, ROOT / "reading_data" / "hdf5.py", "--images", 256)
    done = execute([*words, "--workers", 1, "--folder", tmp_path], timeout=120)
    wrong = execute([*words, "--folder", "/proc/nowhere"], timeout=60)
    assert wrong.code == 1, wrong.err
    assert len(re.findall("hdf5.py: cannot create .*", wrong.err)) == 1, wrong.err
    assert done.code == 0, done.err
    assert re.match(r"2 ranks, 1 workers each: [\d,]+ images/s", done.out)
