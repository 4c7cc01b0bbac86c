"""Records the samples that a rank's DataLoaders draw, and whether its epochs differ."""

import itertools
import threading
from collections.abc import Callable
from contextlib import suppress
from weakref import WeakKeyDictionary, ref

import torch
from torch.utils import data

from .fingerprints import batch_checksums, random_states, sample_checksum
from .hooks import never_raise
from .internals import DATA_LOADER_ITERATOR, patch

RECORDED_INDICES = 10_000  # per epoch, while gradients are measured
FEW = 100  # after that, to compare the order of epochs
SHARES = ("num_replicas", "num_processes", "world_size")  # names in public samplers


class Data:
    """Hooks that record which samples are drawn, and by which batches the model is trained.

    The last batch that a loader returned before backward() counts as used. Loaders that are made
    at the same place of the script, one after the other, count as one.
    """

    def __init__(self, add_event: Callable, find_places: Callable[[], list[str]],
                 is_measuring: Callable[[], bool]):
        self.add_event, self.find_places = add_event, find_places
        self.is_measuring = is_measuring
        self.loaders = {}  # {(places and types): [[reference to the DataLoader, its facts]]}
        self.epochs = WeakKeyDictionary()  # {iterator: (its loader, facts and epoch)}
        self.counter = itertools.count()
        self.samplers = WeakKeyDictionary()  # {DistributedSampler: its number}
        self.set_samplers = set()  # DistributedSamplers after set_epoch(), before the epoch
        self.last_batches = {}  # {name of a loader: (its facts, its epoch, its last batch)}

    def install(self):
        patch(f"{DATA_LOADER_ITERATOR}.__init__", before=self.begin_epoch)
        patch(f"{DATA_LOADER_ITERATOR}._reset", before=self.begin_next_epoch)
        patch(f"{DATA_LOADER_ITERATOR}._next_index", after=self.note_indices)
        patch(f"{DATA_LOADER_ITERATOR}.__next__", after=self.note_batch)
        patch("torch.utils.data:DistributedSampler.set_epoch", after=self.note_set_epoch)

    @never_raise
    def note_set_epoch(self, _, sampler, *__):
        self.set_samplers.add(sampler)

    @never_raise
    def begin_epoch(self, iterator, loader, *_):
        sampler, facts = loader.sampler, self.find_facts(loader)
        epoch = {"indices": [], "used": False, "shuffled": False}
        if isinstance(sampler, data.DistributedSampler) and sampler.shuffle:
            epoch |= {"shuffled": True, "seed": sampler.seed + sampler.epoch,
                      "is set": sampler in self.set_samplers,
                      "sampler": self.samplers.setdefault(sampler, next(self.counter))}
            self.set_samplers.discard(sampler)
        self.epochs[iterator] = loader, facts, epoch
        facts["epochs"].append(epoch)
        if isinstance(sampler, (list, tuple)) and loader.batch_size:  # of all indices
            epoch["indices"] = indices_in_whole(loader.dataset, sampler)

    def find_facts(self, loader):
        """Return a loader's facts, under a name that is the same on all ranks.

        The name is the place at which its iterator is made: numbers would differ if one rank has a
        loader that the others do not have.
        """
        key = (*self.find_places(), type(loader.dataset).__name__, type(loader.sampler).__name__)
        known = self.loaders.setdefault(key, [])
        own = [entry for entry in known if entry[0]() is loader]
        for entry in own or [entry for entry in known if entry[0]() is None]:
            entry[0] = ref(loader)
            return entry[1]
        known.append([ref(loader), describe(loader, f"{len(known)} of {key}")])
        return known[-1][1]

    @never_raise
    def begin_next_epoch(self, iterator, loader, first_iter=False):
        """Begin an epoch of persistent workers, whose iterator is new in the first epoch only."""
        if not first_iter:
            self.begin_epoch(iterator, loader)

    @never_raise
    def note_indices(self, indices, iterator):
        loader, facts, epoch = self.epochs[iterator]
        if loader.num_workers and not loader.worker_init_fn and (
                iterator._base_seed not in facts["seeds"]):
            facts["seeds"].append(iterator._base_seed)
        room = (RECORDED_INDICES if self.is_measuring() else FEW) - len(epoch["indices"])
        if not isinstance(loader.sampler, (list, tuple)) and room > 0:
            indices = indices if isinstance(indices, (list, tuple)) else [indices]
            epoch["indices"] += indices_in_whole(loader.dataset, indices[:room])

    @never_raise
    def note_batch(self, batch, iterator):
        if batch is None or not torch.is_grad_enabled():  # the end of an epoch, an evaluation
            return
        _, facts, epoch = self.epochs[iterator]
        self.last_batches[facts["name"]] = facts, epoch, batch
        if threading.current_thread() is threading.main_thread():  # else in a random order
            self.add_event("draw", facts["name"], len(facts["epochs"]))

    def note_backward(self):
        """Record each loader's last batch: no backward pass used the earlier ones."""
        for facts, epoch, batch in self.last_batches.values():
            epoch["used"] = True
            if self.is_measuring():
                facts["batches"].append(batch_checksums(batch))
        self.last_batches = {}

    def report(self, steps: int) -> list[dict]:
        """Return the facts of the loaders whose batches were used in half of the steps or more."""
        reports = []
        for _, facts in itertools.chain(*self.loaders.values()):
            if facts["batches"] and 2 * len(facts["batches"]) >= steps:
                dataset = facts["dataset"]
                reports.append(facts | {
                    "dataset": "", "probes": probe(dataset), "draws": random_sources(dataset),
                    "epochs": [epoch for epoch in facts["epochs"] if epoch["used"]]})
        return reports


def describe(loader, name):
    """Return the facts of a DataLoader and its sampler."""
    sampler, batch_sampler = loader.sampler, loader.batch_sampler
    is_distributed = without_replacement = isinstance(sampler, data.DistributedSampler)
    if type(batch_sampler) is data.BatchSampler and type(sampler) in (
            data.RandomSampler, data.SequentialSampler, data.SubsetRandomSampler):
        without_replacement = not getattr(sampler, "replacement", False)
    elif isinstance(sampler, (list, tuple)):
        without_replacement = len(set(sampler)) == len(sampler)
    shares = [getattr(owner, share, None) for owner in (sampler, batch_sampler) for share in SHARES]
    return {"name": name, "seeds": [], "dataset": loader.dataset, "epochs": [], "batches": [],
            "stream": isinstance(loader.dataset, data.IterableDataset),
            "dataset_size": size_of(loader.dataset), "sampler": type(sampler).__name__,
            "is_distributed": is_distributed, "without_replacement": without_replacement,
            "batch_sampler": type(batch_sampler) not in (data.BatchSampler, type(None)),
            "shares": next((share for share in shares if isinstance(share, int)), None)}


def size_of(dataset):
    with suppress(TypeError, NotImplementedError):
        return len(dataset)
    return 0  # a stream


def indices_in_whole(dataset, indices):
    """Return the samples' indices in the whole data set, if this one is a subset."""
    indices = [index for index in indices if hasattr(index, "__index__")]
    while isinstance(dataset, data.Subset):
        dataset, indices = dataset.dataset, [dataset.indices[index] for index in indices]
    return [int(index) for index in indices]


def random_sources(dataset):
    """Return by which random numbers, such as Python's, a data set draws a sample."""
    with suppress(Exception):  # as in probe()
        before = random_states()
        dataset[0]
        return sorted(name for name, _ in random_states().items() - before.items())
    return []


def probe(dataset):
    """Return checksums of three samples of the whole data set, which tell what indices mean.

    Return none for a stream, and if a sample depends on other things than its index and the seed.
    """
    while isinstance(dataset, data.Subset):
        dataset = dataset.dataset
    with suppress(Exception):  # a stream has no length; a file may be open in the workers alone
        places = sorted({0, len(dataset) // 2, len(dataset) - 1})
        probes = [sample_checksum(dataset, index) for index in places]
        again = [sample_checksum(dataset, index) for index in places]
        if probes == again and len(set(probes)) == len(probes):
            return probes
    return []
