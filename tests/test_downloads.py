"""Data sets come whole or not at all: servers that fail in each way, files that are broken, two jobs at once."""

import gzip
import hashlib
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import forked
import pytest
from conftest import NO_NETWORK, ON, PROGRAMS, case, environment, execute, lines, side_by_side
from faults import fault
from lab import Lab, real_lab
from launch import command
from test_data import write_mnist, write_svhn

HERE = {"no_proxy": "127.0.0.1"}  # what is on this machine is asked without NO_NETWORK's proxy
SERVED = PROGRAMS / "served.py"
LOGIN = b"<html><title>Welcome to the conference's network</title><form>room, name</form></html>"
PATIENCE = 60  # seconds for a job that waits 3 for an answer, on a busy machine
FILES = {"mnist": 4, "svhn": 2}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A folder with the files of small data sets as their servers have them, in `mnist` and `svhn` as they are used."""
    folder = tmp_path_factory.mktemp("source")
    for path in sorted(write_mnist(folder / "mnist", 120, 40).iterdir()):
        (folder / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    (folder / "svhn").mkdir()
    write_svhn(folder / "svhn", 80, 20)
    for path in (folder / "svhn").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def whole(source, dataset, folder):
    """Whether the folder has the data set's files, all of them and with the right bytes."""
    expected = {path.relative_to(source / dataset): path.read_bytes()
                for path in (source / dataset).rglob("*") if path.is_file()}
    assert len(expected) == FILES[dataset]
    return all((folder / name).is_file() and (folder / name).read_bytes() == content
               for name, content in expected.items())


class Handler(BaseHTTPRequestHandler):
    """Answers as the server's `manner` says."""

    def do_GET(self):
        self.server.asked[self.path] += 1
        with suppress(ConnectionError):  # torchvision asks, and hangs up, to see where it is redirected
            getattr(self, self.server.manner)()

    do_CONNECT = do_GET

    def log_message(self, *_):
        """Nothing is printed."""

    def content(self):
        name = self.path.rpartition("/")[2]
        path = self.server.folder / name
        return path.read_bytes() if name and path.is_file() else None

    def send(self, content, length=None):
        self.send_response(200)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        self.wfile.write(content)
        self.wfile.flush()

    def serves(self):
        self.send(self.content())

    def stops_in_the_middle(self):
        self.send(self.content()[:-100], len(self.content()))

    def is_silent_in_the_middle(self):
        self.stops_in_the_middle()
        self.is_silent()

    def is_silent(self):
        self.server.ended.wait(60)

    def sends_other_bytes(self):
        content = bytearray(self.content())
        content[len(content) // 2] ^= 1
        self.send(content)

    def sends_nothing(self):
        self.send(b"")

    def says_404(self):
        self.send_error(404)

    def says_403(self):
        self.send_error(403)

    def says_500(self):
        self.send_error(500)

    def sends_a_login_page(self):
        self.send(LOGIN)

    def redirects_to_a_login_page(self):
        if self.path == "/login":
            return self.send(LOGIN)
        self.send_response(302)
        self.send_header("Location", "/login")
        self.end_headers()

    def redirects_for_ever(self):
        self.send_response(302)
        self.send_header("Location", f"{self.path}/again")
        self.end_headers()

    def hangs_up(self):
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
        self.connection.close()

    def speaks_no_http(self):
        self.wfile.write(b"SSH-2.0-OpenSSH_9.2\r\n" * 20)

    def serves_two_at_once(self):
        """Who asks first for a file gets half of it, who asks next its length; then the first gets the rest.

        Where both write into one file, the second has emptied what the first wrote.
        """
        content, meeting = self.content(), self.server.meetings[self.path]
        if self.headers["Method"] == "HEAD":  # so torchvision asks whether there is a redirection
            return self.send(content)
        with meeting.lock:
            meeting.come += 1
            first = meeting.come == 1
        sent = len(content) // 2 if first else 0
        self.send(content[:sent], len(content))
        if first:
            meeting.second.wait(20)
        else:
            meeting.second.set()
        time.sleep(0.1 if first else 0.5)  # the other's file is opened; the first one's is checked
        self.wfile.write(content[sent:])


@contextmanager
def server(source, manner, folder):
    """A server on this machine. Gives its address, what was asked of it, and SERVED's first argument."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.folder, http.manner, http.asked, http.ended = source, manner, Counter(), threading.Event()
        http.meetings = {f"/{path.name}": SimpleNamespace(come=0, lock=threading.Lock(), second=threading.Event())
                         for path in source.iterdir()}
        thread = threading.Thread(target=http.serve_forever, args=(0.05,))
        thread.start()
        try:
            url = f"http://127.0.0.1:{http.server_port}/"
            path = folder / f"{manner}.json"
            patience = {} if manner.startswith("serves") else {"patience": 3}
            yield SimpleNamespace(url=url, asked=http.asked, words=words(source, url, path, **patience))
        finally:
            http.ended.set()
            http.shutdown()
            thread.join()


def words(source, url, path, patience=30):
    """A file for served.py: the address, the sums, and seconds to wait for an answer. Returns its path."""
    sums = {file.name: hashlib.md5(file.read_bytes()).hexdigest() for file in source.iterdir() if file.is_file()}
    path.write_text(json.dumps({"url": url, "sums": sums, "patience": patience}))
    return path


def flags(dataset, data_dir, *more):
    return ["--dataset", dataset, "--data-dir", data_dir, "--epochs", 1, "--batch-size", 20, "--device", "cpu", *more]


def train(chapter, dataset, data_dir, origin, ranks=None, env=None):
    """Run a chapter, forked, whose data sets are at the origin, a file of words()."""
    main = command(chapter, 1)[-1]
    return forked.run([SERVED, origin, main, *flags(dataset, data_dir)], ranks or ON.get(chapter, 2),
                      environment() | NO_NETWORK | HERE | (env or {}), timeout=60)


def refused(done, dataset):
    """One line, of one rank, after the bars of what it downloaded."""
    said = [line for line in done.err.splitlines() if line and not re.search(r"%\||[0-9.]+[kM]?B \[", line)]
    assert done.code == 2 and len(said) == 1, (done.code, done.err)
    assert re.match(rf"(main(_tf)?|fsdp)\.py: no whole {dataset} in --data-dir ", said[0]), said
    assert not done.out, done.out


# What servers do

FAILURES = ["stops_in_the_middle", "is_silent_in_the_middle", "is_silent", "sends_other_bytes", "sends_nothing",
            "says_404", "says_403", "says_500", "sends_a_login_page", "redirects_to_a_login_page", "redirects_for_ever",
            "hangs_up", "speaks_no_http"]
SOME = ["sends_other_bytes", "stops_in_the_middle"]
OTHERS = ["01_single_node", "01_single_node/main_tf.py", "02_horovod/pytorch", "02_horovod/tensorflow", "04_deepspeed"]


def mark(manner):
    """In the fault table, what the server does."""
    return fault("data", f"a server {manner.replace('_', ' ')}")


@pytest.mark.parametrize(("chapter", "dataset", "manner"), [
    *(case("03_ddp", "mnist", manner, marks=[mark(manner)]) for manner in FAILURES),
    *(case("03_ddp", "svhn", manner, marks=[mark(manner)]) for manner in SOME),
    *(case(chapter, "mnist", SOME[0], marks=[mark(SOME[0])]) for chapter in OTHERS)])
def test_what_a_server_does_is_one_line_and_a_good_one_mends_it(chapter, dataset, manner, source, tmp_path):
    data = tmp_path / "data"
    started = time.monotonic()
    with server(source, manner, tmp_path) as bad:
        refused(train(chapter, dataset, data, bad.words), dataset)
    assert bad.asked and time.monotonic() - started < PATIENCE
    with server(source, "serves", tmp_path) as good:
        done = train(chapter, dataset, data, good.words)
    assert done.code == 0 and "test accuracy" in done.out, done.err
    assert whole(source, dataset, data)


@pytest.mark.parametrize(("manner", "said"), [
    ("says_403", "403"), ("sends_other_bytes", "corrupted"),
    ("is_silent", "timed out"), ("speaks_no_http", "SSH")])
def test_the_line_says_why(manner, said, source, tmp_path):
    with server(source, manner, tmp_path) as bad:
        done = train("01_single_node", "mnist", tmp_path / "data", bad.words)
    refused(done, "mnist")
    assert said in done.err.splitlines()[-1]


@fault("data", "a server serves: downloaded once, then never again")
@pytest.mark.parametrize(("chapter", "dataset"), [
    case("03_ddp", "mnist"), case("03_ddp", "svhn"), case("02_horovod/pytorch", "mnist"),
    case("04_deepspeed", "mnist"), case("02_horovod/tensorflow", "svhn")])
def test_rank_0_alone_downloads_and_once(chapter, dataset, source, tmp_path):
    with server(source, "serves", tmp_path) as good:
        for _ in range(2):
            done = train(chapter, dataset, tmp_path / "data", good.words)
            assert done.code == 0 and "test accuracy" in done.out, done.err
    assert len(good.asked) == FILES[dataset] and set(good.asked.values()) == {2}  # where is it? and: give it to me
    assert whole(source, dataset, tmp_path / "data")


@pytest.mark.parametrize("address", ["http://data.invalid/", "https://data.invalid/"])
@pytest.mark.parametrize("proxy", [
    pytest.param(proxy, marks=fault("data", f"a proxy {proxy.replace('_', ' ')}"))
    for proxy in ("is_not_there", "says_403", "is_silent", "sends_a_login_page")])
def test_what_a_proxy_does_is_one_line(address, proxy, source, tmp_path):
    origin = words(source, address, tmp_path / "origin.json")
    if proxy == "is_not_there":
        return refused(train("03_ddp", "mnist", tmp_path / "data", origin), "mnist")  # NO_NETWORK
    with server(source, proxy, tmp_path) as between:
        env = dict.fromkeys(NO_NETWORK, between.url.replace("http://", "http://me:hush@"))
        done = train("03_ddp", "mnist", tmp_path / "data", origin, env=env)
    refused(done, "mnist")
    assert between.asked and "hush" not in done.err


@fault("data", "no server listens there")
def test_a_server_that_is_not_there_is_one_line(source, tmp_path):
    with socket.socket() as deaf:  # has a port, and does not listen
        deaf.bind(("127.0.0.1", 0))
        origin = words(source, f"http://127.0.0.1:{deaf.getsockname()[1]}/", tmp_path / "origin.json")
        refused(train("03_ddp", "mnist", tmp_path / "data", origin), "mnist")


@fault("data", "killed while it downloads")
@pytest.mark.parametrize("dataset", FILES)
def test_a_download_that_is_killed_is_begun_again(dataset, source, tmp_path):
    data = tmp_path / "data"
    with server(source, "is_silent_in_the_middle", tmp_path) as half:
        job = subprocess.Popen([*map(str, [sys.executable, SERVED, half.words, command("03_ddp", 1)[-1],
                                           *flags(dataset, data)])],
                               env=environment() | NO_NETWORK | HERE, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
        end = time.monotonic() + 60
        while not any(path.is_file() and path.stat().st_size for path in data.rglob("*")) and time.monotonic() < end:
            time.sleep(0.01)
        job.send_signal(signal.SIGKILL)
        job.wait()
    assert [*data.rglob("*.*")] and not whole(source, dataset, data)
    with server(source, "serves", tmp_path) as good:
        assert train("03_ddp", dataset, data, good.words).code == 0
    assert whole(source, dataset, data)


# What lies there

@pytest.fixture
def data(source, tmp_path):
    """A function of the data set's name: a folder into which it was downloaded."""
    def download(dataset):
        with server(source, "serves", tmp_path) as good:
            done = train("03_ddp", dataset, tmp_path / "data", good.words, ranks=1)
        assert done.code == 0, done.err
        return tmp_path / "data"

    return download


def largest(folder):
    """The file of training images: what is used is no archive."""
    return max((path for path in folder.rglob("*") if path.is_file() and path.suffix != ".gz"),
               key=lambda path: path.stat().st_size)


HARM = {"is empty": lambda content: b"", "is cut off": lambda content: content[:-1],
        "is longer": lambda content: content + b"more", "has another bit": lambda content: flip(content)}


def flip(content):
    content = bytearray(content)
    content[len(content) // 2] ^= 1
    return bytes(content)


@pytest.mark.parametrize(("dataset", "harm"), [
    pytest.param(dataset, harm, marks=[fault("data", f"a file of {dataset} {harm}")])
    for dataset in FILES for harm in HARM])
def test_a_file_that_is_not_as_it_was_is_refused(dataset, harm, source, data, tmp_path):
    folder = data(dataset)
    path = largest(folder)
    path.write_bytes(HARM[harm](path.read_bytes()))
    origin = words(source, "http://data.invalid/", tmp_path / "origin.json")
    refused(train("03_ddp", dataset, folder, origin), dataset)
    path.unlink()
    with server(source, "serves", tmp_path) as good:
        assert train("03_ddp", dataset, folder, good.words).code == 0
    assert whole(source, dataset, folder)


def read_only_run(folder, *words):
    """Run a command where the folder is mounted read-only, for root too."""
    script = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
    unshare = ["unshare", "--mount", *(["--map-root-user"] if os.getuid() else [])]
    if execute([*unshare, "sh", "-c", script, folder, "true"]).code:
        pytest.skip("this kernel lets nobody mount a folder here")
    assert execute([*unshare, "sh", "-c", script, folder, "touch", folder / "new"]).code
    return execute([*unshare, "sh", "-c", script, folder, *words], timeout=120, env=HERE)


@fault("data", "a read-only folder with whole files")
@pytest.mark.parametrize("dataset", FILES)
def test_a_read_only_folder_is_read(dataset, source, data, tmp_path):
    folder = data(dataset)
    launch = command("03_ddp", 2)
    done = read_only_run(folder, *launch[:-1], SERVED, tmp_path / "serves.json", launch[-1], *flags(dataset, folder))
    assert done.code == 0 and "test accuracy" in done.out, done.err


@fault("data", "a read-only folder without files")
@pytest.mark.parametrize("dataset", FILES)
def test_a_read_only_folder_without_files_is_one_line(dataset, source, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    launch = command("03_ddp", 2)
    with server(source, "serves", tmp_path) as good:
        done = read_only_run(folder, *launch[:-1], SERVED, good.words, launch[-1], *flags(dataset, folder))
    refused(done, dataset)
    assert "Read-only" in done.err and not [*folder.iterdir()]


# Several at once

@fault("data", "two first downloads into one folder at once")
@pytest.mark.parametrize("dataset", FILES)
def test_two_jobs_download_into_one_folder(dataset, source, tmp_path):
    """The second begins each file while the first writes it, and ends it later: see the server."""
    data, launch = tmp_path / "data", command("03_ddp", 2)
    with server(source, "serves_two_at_once", tmp_path) as good:
        start = [*launch[:-1], SERVED, good.words, launch[-1], *flags(dataset, data)], NO_NETWORK | HERE
        ends = side_by_side(start, start)
    for code, printed in ends:
        assert code == 0 and "test accuracy" in printed, printed
    assert whole(source, dataset, data)


@real_lab
@fault("data", "a folder shared by two nodes")
def test_two_nodes_share_a_folder(source, tmp_path):
    """The server is on the first node's loopback: nobody else could have downloaded."""
    with Lab(f"{os.getpid()}-data") as lab:
        lab("up", 2)
        with serving_on_nid1(lab, source, tmp_path) as (origin, log):
            start = "run", "-n", 2, sys.executable, SERVED, origin, command("03_ddp", 1)[-1]
            lab(*start, *flags("mnist", tmp_path / "data", "--results", tmp_path / "results"), env=HERE)
            asked = log.read_text().count('"GET ')
            lab(*start, *flags("mnist", tmp_path / "data"), env=HERE)
            assert log.read_text().count('"GET ') == asked == 2 * FILES["mnist"]
            done = lab(*start, *flags("mnist", "/dev/shm/data"), env=HERE, code=2)  # each node's own
    assert [found["nodes"] for found in lines(tmp_path / "results")] == [2]
    assert whole(source, "mnist", tmp_path / "data")
    refused(done, "mnist")


@contextmanager
def serving_on_nid1(lab, source, folder):
    """A server on the first node alone. Gives the origin for served.py, and the server's log."""
    log = folder / "log"
    with open(log, "w") as file:
        http = lab.start("on", "nid1", sys.executable, "-um", "http.server", "--bind", "127.0.0.1", "--directory",
                         source, 8000, stdout=file, stderr=file)
    try:
        end = time.monotonic() + 20
        while "Serving" not in log.read_text() and time.monotonic() < end:
            time.sleep(0.05)
        yield words(source, "http://127.0.0.1:8000/", folder / "origin.json"), log
    finally:
        http.terminate()
        http.wait()
