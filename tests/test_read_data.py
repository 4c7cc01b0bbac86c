"""All ways to read deliver the same bytes, each image once per epoch, and detect errors."""

import json
import re
import sys

from conftest import BIN, PROGRAMS, ROOT, load_module, read_records, run_command

SOURCE = ROOT / "reading_data" / "read_data.py"
WAYS = list(load_module(SOURCE).WAYS)
SIZE, IMAGES = 3072, 512


def mpiexec_command(ranks, *arguments):
    return [BIN / "mpiexec", "-n", ranks, sys.executable, *arguments]


def run_cases(ranks, cases, **options):
    """Run cases (old text, new text, flags). Return the error lines."""
    command = mpiexec_command(ranks, PROGRAMS / "readers_in_turn.py", SOURCE, json.dumps(cases))
    result = run_command(command, timeout=60, **options)
    assert result.code == 0, result.err
    return result.err.splitlines()


def flags(folder, way):
    return ["--way", way, "--images", str(IMAGES), "--folder", str(folder / "images"),
            "--results", str(folder / "results")]


def test_all_ways_read_the_same_bytes_and_each_image_once(tmp_path):
    assert run_cases(2, [("", "", flags(tmp_path, way)) for way in WAYS]) == []
    records = read_records(tmp_path / "results")
    assert [record["way"] for record in records] == WAYS
    assert len({record["checksum"] for record in records}) == 1
    for record in records:
        assert (record["ranks"], record["nodes"], record["images"]) == (2, 1, IMAGES)
        excess = record["warm_read_bytes"] - SIZE * IMAGES
        if record["way"] == "mpi-io-default":
            assert excess > SIZE * IMAGES / 2
        else:  # the excess is the reading of /proc/self/io itself
            assert 0 <= excess < 4000, record["way"]


def test_each_node_has_its_own_readers(tmp_path):
    """MPICH is told to treat even and odd ranks as two nodes."""
    run_cases(4, [("", "", flags(tmp_path, way)) for way in ("files", "readers")],
              env={"MPIR_CVAR_NUM_CLIQUES": "2"})
    files, readers = read_records(tmp_path / "results")
    assert readers["nodes"] == 2 and readers["checksum"] == files["checksum"]


def test_broken_copies_are_detected(tmp_path):
    count_error, order_error = (
        "missing, duplicated or damaged", "by the wrong rank or in the wrong order")
    cases = [  # the first gives all ranks the same batch, the last rank 0's images
        ("readers", "order[member, step]", "order[0, step]", count_error),
        ("readers", "zip(members, batches)", "zip(members[::-1], batches)", order_error),
        ("mpi-io", "[buffer[step], 1, in_memory]", "buffer[step]", order_error),
        ("files", "images[world.rank::ranks]", "images[0::ranks]", count_error)]
    changes = []
    for number, (way, old, new, _) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        changes.append((old, new, flags(folder, way)))
    messages = run_cases(2, changes)
    assert len(messages) == len(cases), messages
    assert all(expected in message for message, (*_, expected) in zip(messages, cases))


def test_mistakes_get_one_line(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "images.bin").write_bytes(b"another program's")
    cases = {"--way tape": "--way.*tape", "--way files --images 64": "--images.*multiple of 128",
             "--way files --results /none/results": "cannot write /none/results",
             f"--way mpi-io --folder {tmp_path / 'images'}": "images.bin has 17 bytes"}
    messages = run_cases(2, [("", "", command_line.split()) for command_line in cases])
    assert len(messages) == len(cases), messages
    for message, expected in zip(messages, cases.values()):
        assert re.fullmatch(f"read_data.py: .*{expected}.*", message)
    assert (tmp_path / "images" / "images.bin").read_bytes() == b"another program's"


def test_a_dataloader_with_workers_reads_hdf5_on_two_ranks(tmp_path):
    """The program itself checks that each image is read once."""
    command = mpiexec_command(2, ROOT / "reading_data" / "hdf5.py", "--images", 256)
    result = run_command([*command, "--workers", 1, "--folder", tmp_path], timeout=120)
    assert result.code == 0, result.err
    assert re.match(r"2 ranks, 1 workers each: [\d,]+ images/s", result.out)
    refusal = run_command([*command, "--folder", "/proc/nowhere"], timeout=60)
    assert refusal.code == 1, refusal.err
    assert len(re.findall("hdf5.py: cannot create .*", refusal.err)) == 1, refusal.err
