"""Data sets come once, by rank 0, or one line says why not."""

import gzip
import hashlib
import json
import os
import re
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import forked
import pytest
from conftest import NO_NETWORK, ON, PROGRAMS, case, environment, execute
from launch import command
from test_data import write_mnist, write_svhn

HERE = {"no_proxy": "127.0.0.1"}  # what is on this machine is asked without NO_NETWORK's proxy
SERVED = PROGRAMS / "served.py"
PATIENCE = 60  # seconds for a job that waits 3 for an answer, on a busy machine
FILES = {"mnist": 4, "svhn": 2}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A folder with the files of small data sets as their servers have them."""
    folder = tmp_path_factory.mktemp("source")
    for path in sorted(write_mnist(folder / "mnist", 120, 40).iterdir()):
        (folder / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    write_svhn(folder, 80, 20)
    return folder


class Handler(BaseHTTPRequestHandler):
    """Answers as the server's `manner` says."""

    def do_GET(self):
        self.server.asked[self.path] += 1
        with suppress(ConnectionError):  # torchvision asks, and hangs up, to see where it is redirected
            getattr(self, self.server.manner)()

    def log_message(self, *_):
        """Nothing is printed."""

    def send(self, content, length=None):
        self.send_response(200)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        self.wfile.write(content)
        self.wfile.flush()

    def content(self):
        return (self.server.folder / self.path.rpartition("/")[2]).read_bytes()

    def serves(self):
        self.send(self.content())

    def stops_in_the_middle(self):
        self.send(self.content()[:-100], len(self.content()))

    def is_silent(self):
        self.server.ended.wait(60)

    def says_404(self):
        self.send_error(404)

    def sends_a_login_page(self):
        self.send(b"<html><title>Welcome to the conference's network</title><form>room, name</form></html>")


@contextmanager
def server(source, manner, folder):
    """A server on this machine. Gives what was asked of it, and SERVED's first argument."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.folder, http.manner, http.asked, http.ended = source, manner, Counter(), threading.Event()
        thread = threading.Thread(target=http.serve_forever, args=(0.05,))
        thread.start()
        try:
            origin = words(source, f"http://127.0.0.1:{http.server_port}/", folder / f"{manner}.json")
            yield SimpleNamespace(asked=http.asked, words=origin)
        finally:
            http.ended.set()
            http.shutdown()
            thread.join()


def words(source, url, path):
    """A file for served.py: the address, the sums, and seconds to wait for an answer. Returns its path."""
    sums = {file.name: hashlib.md5(file.read_bytes()).hexdigest() for file in source.iterdir() if file.is_file()}
    path.write_text(json.dumps({"url": url, "sums": sums, "patience": 3}))
    return path


def flags(dataset, data_dir):
    return ["--dataset", dataset, "--data-dir", data_dir, "--epochs", 1, "--batch-size", 20, "--device", "cpu"]


def train(chapter, dataset, data_dir, origin):
    """Run a chapter, forked, whose data sets are at the origin, a file of words()."""
    main = command(chapter, 1)[-1]
    return forked.run([SERVED, origin, main, *flags(dataset, data_dir)], ON[chapter],
                      environment() | NO_NETWORK | HERE, timeout=60)


def refused(done, dataset):
    """One line, of one rank, after the bars of what it downloaded."""
    said = [line for line in done.err.splitlines() if line and not re.search(r"%\||[0-9.]+[kM]?B \[", line)]
    assert done.code == 2 and len(said) == 1, (done.code, done.err)
    assert re.match(rf"main(_tf)?\.py: no whole {dataset} in --data-dir ", said[0]), said


FAILURES = "stops_in_the_middle", "is_silent", "says_404", "sends_a_login_page"
OTHERS = "01_single_node", "02_horovod/tensorflow"


@pytest.mark.parametrize(("chapter", "dataset", "manner"), [
    case(*row, marks=[pytest.mark.fault]) for row in (
        *(("03_ddp", "mnist", manner) for manner in FAILURES), ("03_ddp", "svhn", FAILURES[0]),
        *((chapter, "mnist", FAILURES[0]) for chapter in OTHERS))])
def test_what_a_server_does_is_one_line_and_a_good_one_mends_it(chapter, dataset, manner, source, tmp_path):
    started = time.monotonic()
    with server(source, manner, tmp_path) as bad:
        refused(train(chapter, dataset, tmp_path / "data", bad.words), dataset)
    assert bad.asked and time.monotonic() - started < PATIENCE
    with server(source, "serves", tmp_path) as good:
        done = train(chapter, dataset, tmp_path / "data", good.words)
    assert done.code == 0 and "test accuracy" in done.out, done.err


@pytest.mark.fault
@pytest.mark.parametrize(("chapter", "dataset"), [
    case("03_ddp", "mnist"), case("03_ddp", "svhn"), case("02_horovod/pytorch", "mnist"),
    case("04_deepspeed", "mnist"), case("02_horovod/tensorflow", "svhn")])
def test_rank_0_alone_downloads_and_once(chapter, dataset, source, tmp_path):
    with server(source, "serves", tmp_path) as good:
        for _ in range(2):
            done = train(chapter, dataset, tmp_path / "data", good.words)
            assert done.code == 0 and "test accuracy" in done.out, done.err
    assert len(good.asked) == FILES[dataset] and set(good.asked.values()) == {2}  # where is it? and: give it to me


@pytest.mark.fault
@pytest.mark.parametrize("dataset", FILES)
def test_no_network_is_one_line(dataset, source, tmp_path):
    origin = words(source, "http://data.invalid/", tmp_path / "origin.json")
    refused(train("03_ddp", dataset, tmp_path / "data", origin), dataset)


@pytest.mark.fault
def test_a_file_that_is_cut_off_is_one_line(tmp_path):
    images = write_mnist(tmp_path / "data") / "train-images-idx3-ubyte"
    os.truncate(images, 5000)
    done = forked.run([command("03_ddp", 1)[-1], *flags("mnist", tmp_path / "data")], 2, environment() | NO_NETWORK)
    refused(done, "mnist")


@pytest.mark.fault
@pytest.mark.parametrize("dataset", FILES)
def test_a_read_only_folder_is_read(dataset, source, tmp_path):
    folder, launch = tmp_path / "data", command("03_ddp", 2)
    with server(source, "serves", tmp_path) as good:
        done = train("03_ddp", dataset, folder, good.words)
    assert done.code == 0, done.err
    script = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'  # for root, too
    unshare = ["unshare", "--mount", *(["--map-root-user"] if os.getuid() else []), "sh", "-c", script, folder]
    if execute([*unshare, "true"]).code:
        pytest.skip("this kernel lets nobody mount a folder here")
    done = execute([*unshare, *launch[:-1], SERVED, good.words, launch[-1], *flags(dataset, folder)], timeout=120)
    assert done.code == 0 and "test accuracy" in done.out, done.err
