"""Data sets are downloaded once, or an error line says why not; each test image counts once."""

import gzip
import hashlib
import json
import re
import struct
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy
import pytest
import scipy.io
from conftest import case, run

slow = [pytest.mark.slow]


def write_mnist(folder, train, test=50):
    """Write files of MNIST's own format (IDX, big-endian header): random images, all labelled 3."""
    raw, random = folder / "MNIST" / "raw", numpy.random.default_rng(0)
    raw.mkdir(parents=True)
    for part, n in ("train", train), ("t10k", test):
        images = random.integers(0, 256, (n, 28, 28), dtype=numpy.uint8)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(
            struct.pack(">IIII", 0x803, n, 28, 28) + images.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(
            struct.pack(">II", 0x801, n) + bytes([3]) * n)
    return raw


def write_svhn(folder, train, test):
    """Write files of SVHN's own format: MATLAB arrays, with 10 for the digit 0."""
    random = numpy.random.default_rng(0)
    for part, n in ("train", train), ("test", test):
        scipy.io.savemat(folder / f"{part}_32x32.mat", {
            "X": random.integers(0, 256, (32, 32, 3, n), dtype=numpy.uint8),
            "y": random.integers(1, 11, (n, 1), dtype=numpy.uint8)})


@pytest.mark.parametrize(("chapter", "ranks", "flags"), [
    case("03_ddp", 7, []), case("02_horovod", 3, []),
    case("02_horovod/main_tf.py", 3, [], marks=slow), case("04_deepspeed", 7, [], marks=slow),
    case("05_zero", 7, ["--stage", 3], marks=slow), case("05_zero/fsdp.py", 7, [], marks=slow)])
def test_each_test_image_is_counted_once(chapter, ranks, flags, tmp_path):
    """All images are labelled 3, also in training, so the accuracy must be 53 of 53.

    The ranks have unequal numbers of images and batches, yet at stage 3 gather layers together.
    """
    write_mnist(tmp_path, 420, 53)
    small_model = ["--width", 32, "--layers", 1, "--lr", 0.1] if chapter.startswith("05") else []
    result = run(chapter, ranks, "--dataset", "mnist", "--data-dir", tmp_path, "--batch-size", 4,
                 "--epochs", 1, *small_model, *flags)
    assert "test accuracy 1.0000 (53 of 53 images)" in result.out, result


class TruncatingHandler(SimpleHTTPRequestHandler):
    def copyfile(self, source, outputfile):
        self.server.requested_paths.append(self.path)
        outputfile.write(source.read()[:-100] if self.server.truncates else source.read())


@pytest.mark.core
@pytest.mark.fault
@pytest.mark.parametrize(("chapter", "dataset", "files"), [
    case("03_ddp", "svhn", 2), case("02_horovod/main_tf.py", "mnist", 4, marks=slow)])
def test_a_truncated_download_is_reported_and_repeated(chapter, dataset, files, tmp_path):
    raw = write_mnist(tmp_path / "mnist", 120, 40)
    for path in list(raw.iterdir()):
        (raw / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    write_svhn(raw, 120, 20)
    sums = {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in raw.iterdir()}
    flags = ("--dataset", dataset, "--batch-size", 20, "--epochs", 1,
             "--data-dir", tmp_path / "data")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(TruncatingHandler, directory=raw)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/"
        (tmp_path / "source").write_text(json.dumps({"url": url, "sums": sums}))
        results = []
        for server.truncates in True, False:
            server.requested_paths = []
            results.append(run(chapter, 2, *flags, hook=["served.py", tmp_path / "source"],
                               env={"no_proxy": "127.0.0.1"}, timeout=60))
        server.shutdown()
    truncated_run, complete_run = results
    message, = re.findall("^main.py: .*", truncated_run.err, re.M)
    assert truncated_run.code == 2 and "Traceback" not in truncated_run.err
    assert message.startswith(f"main.py: {dataset} is missing or incomplete")
    assert complete_run.code == 0 and f"{dataset}: 120 images" in complete_run.out, complete_run.err
    # torchvision requests each file twice: to resolve redirects, and to download.
    assert len(server.requested_paths) == 2 * len(set(server.requested_paths)) == 2 * files
