"""Data sets come once, by rank 0, or one line says why not."""

import gzip
import hashlib
import json
import re
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import forked
import pytest
from conftest import NO_NETWORK, ON, PROGRAMS, case, environment
from test_data import write_mnist, write_svhn

from submit.study import command


class Handler(SimpleHTTPRequestHandler):
    def copyfile(self, source, outputfile):
        self.server.sent.append(self.path)
        outputfile.write(source.read()[:-100] if self.server.cuts_off else source.read())


@pytest.mark.core
@pytest.mark.fault
@pytest.mark.parametrize(("chapter", "dataset", "files"), [
    case("03_ddp", "svhn", 2), case("02_horovod/tensorflow", "mnist", 4, marks=[pytest.mark.slow])])
def test_a_download_that_is_cut_off_is_one_line_and_rank_0_alone_mends_it(chapter, dataset, files, tmp_path):
    raw = write_mnist(tmp_path / "mnist", 120, 40)
    for path in list(raw.iterdir()):
        (raw / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    write_svhn(raw, 120, 20)
    origin, sums = tmp_path / "origin.json", {path.name: hashlib.md5(path.read_bytes()).hexdigest()
                                              for path in raw.iterdir()}
    words = [PROGRAMS / "served.py", origin, command(chapter, 1)[-1], "--dataset", dataset, "--batch-size", 20,
             "--data-dir", tmp_path / "data", "--epochs", 1, "--device", "cpu"]
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=raw)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        origin.write_text(json.dumps({"url": f"http://127.0.0.1:{server.server_port}/", "sums": sums}))
        for server.cuts_off in True, False:
            server.sent = []
            done = forked.run(words, ON[chapter], environment() | NO_NETWORK | {"no_proxy": "127.0.0.1"}, timeout=60)
            if server.cuts_off:
                said = [line for line in done.err.splitlines() if line and not re.search(r"%\||B \[", line)]
                assert done.code == 2 and len(said) == 1, done.err
                assert re.match(rf"main\.py: no whole {dataset} in --data-dir ", said[0]), said
        server.shutdown()
    assert done.code == 0 and f"{dataset}: 120 images" in done.out, done.err
    assert len(server.sent) == 2 * len(set(server.sent)) == 2 * files  # each: where is it? and: give it to me
