"""reading_data/: each sample once per epoch, and resumed, on any ranks and workers."""

import itertools
import re

import numpy as np
import pytest
from conftest import ROOT, load_module, run
from torch.utils.data import DataLoader

SOURCE = "reading_data/stream.py"
BATCH = 3  # per rank
LENGTHS = [5, 40, 1, 13, 22]
SPANS = [(file, 0, LENGTHS[file]) for file in (3, 1, 0, 4, 2)]


@pytest.fixture
def read_epoch(tmp_path):
    """Return a function that reads spans: the numbers in each rank's batches, and a stream."""
    module, numbers, files = load_module(ROOT / SOURCE), itertools.count(), []
    for file, length in enumerate(LENGTHS):
        files.append((tmp_path / f"{file}.csv", length))
        lines = [f"{next(numbers)},0,0\n" for _ in range(length)]
        files[-1][0].write_text("".join(lines))

    def read(spans, ranks, workers, epoch=1):
        batches = []
        for rank in range(ranks):
            stream = module.Stream(files, spans, epoch, BATCH, rank, ranks, max(workers, 1))
            loader = DataLoader(stream, BATCH, num_workers=workers,
                                multiprocessing_context="fork" if workers else None)
            batches.append([labels.tolist() for labels, _ in loader])
        return batches, stream

    return read


def flatten(batches):
    return np.array(batches, int).ravel().tolist()


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (2, 2), (3, 2)])
def test_each_sample_once_in_equally_many_steps(ranks, workers, read_epoch):
    """In each epoch, and in another order; few files are read by two workers."""
    orders, all_workers = [], ranks * max(workers, 1)
    for epoch in range(2):
        batches, stream = read_epoch(SPANS, ranks, workers, epoch)
        assert {len(steps) for steps in batches} == {stream.steps}
        orders.append(flatten(batches))
        left_over = sum(LENGTHS) - len(set(orders[-1]))
        assert len(orders[-1]) == len(set(orders[-1])) and left_over < all_workers * BATCH
        reads = sum(len(stream.part(worker)) for worker in range(all_workers))
        assert reads < len(LENGTHS) + all_workers
    assert orders[0] != orders[1]


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("layouts", [[(1, 0), (2, 2)], [(3, 2), (2, 0), (1, 2)]])
def test_an_epoch_is_resumed_on_other_ranks(layouts, steps, read_epoch):
    """Stop an epoch some steps after each start; each (ranks, workers) reads the rest."""
    spans, samples = SPANS, []
    for ranks, workers in layouts:
        batches, stream = read_epoch(spans, ranks, workers)
        samples += flatten([rank_batches[:steps] for rank_batches in batches])
        spans = stream.left(steps)
    assert sum(end - begin for _, begin, end in spans) == sum(LENGTHS) - len(samples)
    samples += flatten(read_epoch(spans, ranks, workers)[0])
    left_over = sum(LENGTHS) - len(set(samples))
    assert len(samples) == len(set(samples)) and left_over < ranks * max(workers, 1) * BATCH


def test_two_ranks_train_and_one_continues(tmp_path):
    """With spawned workers, and equally many steps, or else DDP would wait for ever."""
    first = run(SOURCE, 2, "--workers", 1, "--max-steps", 30, cwd=tmp_path, timeout=120)
    rest = run(SOURCE, 1, "--workers", 0, "--resume", cwd=tmp_path, timeout=60)
    assert first.code == rest.code == 0, first.err + rest.err
    epochs = re.findall(r"epoch (\d): (\d+) of (\d+) steps", first.out + rest.out)
    assert [tuple(map(int, epoch)) for epoch in epochs] == [
        (1, 22, 22), (2, 8, 22), (2, 14, 14), (3, 22, 22)]


def test_a_dataloader_with_workers_reads_hdf5_on_two_ranks(tmp_path):
    """The program itself checks that each image is read once."""
    result = run("reading_data/hdf5.py", 2, "--workers", 1, cwd=tmp_path)
    assert result.code == 0, result.err
    assert re.match(r"2 ranks, 1 workers each: [\d,]+ images/s", result.out)
