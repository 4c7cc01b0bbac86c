"""Records the samples that a rank's DataLoaders draw, and whether its epochs differ."""

import time
from collections.abc import Callable
from contextlib import suppress
from weakref import WeakKeyDictionary

import torch
from torch.utils import data

from .fingerprints import batch_checksums, sample_checksum, tensors_in
from .hooks import never_raise, wrap_method

RECORDED_INDICES = 10_000  # per epoch, while gradients are measured
FEW = 100  # after that, to compare the order of epochs
READ_SAMPLES, READ_SECONDS = 64, 5  # that agree reads from a data set itself
SHARES = ("num_replicas", "num_processes", "world_size")  # names in public samplers


class Data:
    """Hooks that record which samples are drawn, and by which batches the model is trained.

    The last batch that a loader returned before backward() counts as used.
    """

    def __init__(self, add_event: Callable):
        self.add_event = add_event
        self.is_measuring = True
        self.loaders = {}  # {DataLoader, or its DistributedSampler: facts}
        self.epochs = WeakKeyDictionary()  # {iterator: (its loader, facts and epoch)}
        self.set_samplers = set()  # DistributedSamplers after set_epoch(), before the epoch
        self.last_batches = {}  # {number of a loader: (its facts, its epoch, its last batch)}

    def install(self):
        iterator = data.dataloader._BaseDataLoaderIter
        wrap_method(iterator, "__init__", before=self.begin_epoch)
        wrap_method(iterator, "_reset", before=self.begin_next_epoch)
        wrap_method(iterator, "_next_index", after=self.note_indices)
        wrap_method(iterator, "__next__", after=self.note_batch)
        wrap_method(data.DistributedSampler, "set_epoch", after=self.note_set_epoch)

    @never_raise
    def note_set_epoch(self, _, sampler, *__):
        self.set_samplers.add(sampler)

    @never_raise
    def begin_epoch(self, iterator, loader, *_):
        sampler = loader.sampler
        key = sampler if isinstance(sampler, data.DistributedSampler) else loader
        facts = self.loaders.setdefault(key, describe(loader, len(self.loaders)))
        is_shuffled = isinstance(sampler, data.DistributedSampler) and sampler.shuffle
        epoch = {"indices": [], "used": False, "shuffled": is_shuffled,
                 "seed": sampler.seed + sampler.epoch if is_shuffled else None,
                 "is set": is_shuffled and sampler in self.set_samplers}
        self.set_samplers.discard(sampler)
        self.epochs[iterator] = loader, facts, epoch
        facts["epochs"].append(epoch)
        if isinstance(sampler, (list, tuple)) and loader.batch_size:  # of all indices
            epoch["indices"] = indices_in_whole(loader.dataset, sampler)

    @never_raise
    def begin_next_epoch(self, iterator, loader, first_iter=False):
        """Begin an epoch of persistent workers, whose iterator is new in the first epoch only."""
        if not first_iter:
            self.begin_epoch(iterator, loader)

    @never_raise
    def note_indices(self, indices, iterator):
        loader, _, epoch = self.epochs[iterator]
        room = (RECORDED_INDICES if self.is_measuring else FEW) - len(epoch["indices"])
        if not isinstance(loader.sampler, (list, tuple)) and room > 0:
            indices = indices if isinstance(indices, (list, tuple)) else [indices]
            epoch["indices"] += indices_in_whole(loader.dataset, indices[:room])

    @never_raise
    def note_batch(self, batch, iterator):
        if batch is not None and torch.is_grad_enabled():
            _, facts, epoch = self.epochs[iterator]
            self.last_batches[facts["number"]] = facts, epoch, batch
            first = next((part for part in tensors_in(batch) if part.dim()), ())
            self.add_event("draw", facts["number"], len(facts["epochs"]), size=len(first))

    def note_backward(self):
        """Record each loader's last batch: no backward pass used the earlier ones."""
        for facts, epoch, batch in self.last_batches.values():
            epoch["used"] = True
            if self.is_measuring:
                facts["batches"].append(batch_checksums(batch))
        self.last_batches = {}

    def report(self, steps: int) -> list[dict]:
        """Return the facts of the loaders whose batches were used in half of the steps or more."""
        reports = []
        for loader in self.loaders.values():
            batches = len(loader["batches"])
            if batches and 2 * batches >= steps:
                epochs = [epoch for epoch in loader["epochs"] if epoch["used"]]
                samples = read_samples(loader["dataset"], epochs[0]["indices"])
                facts = {key: value for key, value in loader.items() if key != "dataset"}
                reports.append(facts | samples | {"epochs": epochs})
        return reports


def describe(loader, number):
    """Return the facts of a DataLoader and its sampler."""
    stream, sampler = isinstance(loader.dataset, data.IterableDataset), loader.sampler
    is_distributed = isinstance(sampler, data.DistributedSampler)
    shares = [getattr(owner, name, None) for owner in (sampler, loader.batch_sampler)
              for name in SHARES]
    facts = {"number": number, "dataset": loader.dataset, "stream": stream,
             "dataset_size": size_of(loader.dataset), "length": size_of(loader),
             "sampler": type(sampler).__name__, "is_distributed": is_distributed,
             "shares": next((share for share in shares if isinstance(share, int)), None),
             "without_replacement": is_distributed, "epochs": [], "batches": []}
    if type(loader.batch_sampler) is data.BatchSampler and type(sampler) in (
            data.RandomSampler, data.SequentialSampler, data.SubsetRandomSampler):
        facts["without_replacement"] = not getattr(sampler, "replacement", False)
    elif isinstance(sampler, (list, tuple)):
        facts["without_replacement"] = len(set(sampler)) == len(sampler)
    return facts


def size_of(sized):
    with suppress(TypeError, NotImplementedError):
        return len(sized)
    return 0  # a stream, or a sampler without an end


def indices_in_whole(dataset, indices):
    """Return the samples' indices in the whole data set, if this one is a subset."""
    indices = [index for index in indices if hasattr(index, "__index__")]
    while isinstance(dataset, data.Subset):
        dataset, indices = dataset.dataset, [dataset.indices[index] for index in indices]
    return [int(index) for index in indices]


def read_samples(dataset, indices):
    """Read samples of the whole data set, with equal seeds: what do the indices mean?

    Return checksums of three samples ("probes"), and of those drawn ("drawn"). Both are empty for
    a stream, and if a sample depends on other things than its index.
    """
    while isinstance(dataset, data.Subset):
        dataset = dataset.dataset
    deadline = time.monotonic() + READ_SECONDS
    drawn = []
    try:
        places = sorted({0, len(dataset) // 2, len(dataset) - 1})
        probes = [sample_checksum(dataset, index) for index in places]
        again = [sample_checksum(dataset, index) for index in places]
        if probes == again and len(set(probes)) == len(probes):
            for index in indices[:READ_SAMPLES]:
                if time.monotonic() < deadline:
                    drawn.append(sample_checksum(dataset, index))
            return {"probes": probes, "drawn": drawn}
    except Exception:  # a stream has no length; a file may be open in the workers alone
        pass
    return {"probes": [], "drawn": []}
