"""reading_data/: each sample once per epoch, and resumed, on any ranks and workers."""

import gzip
import itertools
import re

import numpy as np
import pytest
from conftest import ROOT, load_module, run
from torch.utils.data import DataLoader

SOURCE = "reading_data/stream.py"
BATCH = 3  # per rank
LENGTHS = {"unequal": [5, 40, 1, 13, 22], "two files": [31, 4]}


@pytest.fixture
def module():
    return load_module(ROOT / SOURCE)


@pytest.fixture
def files(tmp_path, request):
    """Return paths and lengths of files whose samples are numbered across all files."""
    lengths, numbers = LENGTHS[getattr(request, "param", "unequal")], itertools.count()
    paths = [tmp_path / f"{file}.csv.gz" for file in range(len(lengths))]
    for path, length in zip(paths, lengths):
        with gzip.open(path, "wt") as file:
            file.writelines(f"{next(numbers)},0,0\n" for _ in range(length))
    return paths, lengths


def read_epoch(module, files, ranks, workers, epoch=1, rest=None):
    """Return the sample numbers in each rank's batches, and a stream."""
    batches = []
    for rank in range(ranks):
        stream = module.Stream(*files, BATCH, rank, ranks, rest or {})
        stream.set_epoch(epoch)
        loader = DataLoader(stream, BATCH, num_workers=workers,
                            multiprocessing_context="fork" if workers else None)
        batches.append([indices.tolist() for indices, *_ in loader])
    return batches, stream


def flatten(batches):
    return np.array(batches, int).ravel().tolist()


@pytest.mark.parametrize("files", LENGTHS, indirect=True)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_sample_once_in_equally_many_steps(ranks, workers, files, module):
    """Two epochs have the same number of steps, each sample once, and another order."""
    total, orders, reads, read = sum(files[1]), [], [], module.read
    module.read = lambda path: reads.append(path) or read(path)  # a worker has its own list
    for epoch in range(2):
        batches, stream = read_epoch(module, files, ranks, workers, epoch)
        assert {len(steps) for steps in batches} == {total // (ranks * BATCH)} == {stream.steps()}
        samples = flatten(batches)
        assert len(samples) == len(set(samples)) > total - ranks * BATCH
        orders.append(samples)
    assert len(reads) < 2 * (len(files[0]) + ranks)
    assert orders[0] != orders[1]
    assert len(orders[0]) == total or set(orders[0]) != set(orders[1])  # others are dropped


@pytest.mark.parametrize("done", [1, 2, 4])
@pytest.mark.parametrize("layouts", [[(1, 0), (2, 2)], [(2, 0), (1, 2)], [(3, 2), (2, 0), (1, 2)]])
def test_an_epoch_is_resumed_on_other_ranks(layouts, done, files, module):
    """Interrupt an epoch `done` steps after each start; each (ranks, workers) reads the rest."""
    total, rest, samples = sum(files[1]), {}, []
    for ranks, workers in layouts:
        batches, stream = read_epoch(module, files, ranks, workers, rest=rest)
        samples += flatten([steps[:done] for steps in batches])
        rest = {1: stream.left(done, max(workers, 1))}
        remainder, _ = read_epoch(module, files, ranks, workers, rest=rest)
        assert remainder == [steps[done:] for steps in batches]  # in order, on the same ranks
    assert sum(end - begin for _, begin, end in rest[1]) == total - len(samples)
    samples += flatten(remainder)
    assert len(samples) == len(set(samples)) > total - ranks * BATCH


def test_persistent_workers_see_the_new_epoch(files, module):
    stream = module.Stream(*files, BATCH, 0, 1, {})
    loader = DataLoader(stream, BATCH, num_workers=2, persistent_workers=True,
                        multiprocessing_context="fork")
    for epoch in range(2):
        stream.set_epoch(epoch)
        batches = [indices.tolist() for indices, *_ in loader]
        assert [batches] == read_epoch(module, files, 1, 2, epoch)[0]


def test_two_ranks_train_and_one_continues(tmp_path):
    """The program itself counts the different samples; spawned workers see the second epoch."""
    first = run(SOURCE, 2, "--workers", 1, "--max-steps", 30, cwd=tmp_path, timeout=120)
    rest = run(SOURCE, 1, "--workers", 0, "--resume", cwd=tmp_path, timeout=60)
    assert first.code == rest.code == 0, first.err + rest.err
    epochs = re.findall(r"(\d): (\d+) of (\d+) steps, (\d+) samples, (\d+) different",
                        first.out + rest.out)
    assert [tuple(map(int, epoch)) for epoch in epochs] == [
        (1, 22, 22, 1408, 1408), (2, 8, 22, 512, 512), (2, 14, 14, 896, 896),
        (3, 22, 22, 1408, 1408)]


def test_a_dataloader_with_workers_reads_hdf5_on_two_ranks(tmp_path):
    """The program itself checks that each image is read once."""
    result = run("reading_data/hdf5.py", 2, "--workers", 1, launcher=True, cwd=tmp_path)
    assert result.code == 0, result.err
    assert re.match(r"2 ranks, 1 workers each: [\d,]+ images/s", result.out)
