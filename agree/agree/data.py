"""Records the samples that a rank's DataLoaders draw, and whether its epochs differ."""

import itertools
import threading
from collections.abc import Callable
from contextlib import suppress
from weakref import WeakKeyDictionary, ref

import torch
from torch.utils import data

from .fingerprints import batch_checksums, random_states, sample_checksum, tensors_in
from .hooks import never_raise, wrap_method

RECORDED_INDICES = 10_000  # per epoch, while gradients are measured
FEW = 100  # after that, to compare the order of epochs
SHARES = ("num_replicas", "num_processes", "world_size")  # names in public samplers


class Data:
    """Hooks that record which samples are drawn, and by which batches the model is trained.

    The last batch that a loader returned before backward() counts as used. Loaders that are made
    anew at the same place of the script, one after the other, count as one.
    """

    def __init__(self, add_event: Callable, find_places: Callable[[], list[str]],
                 count_reductions: Callable[[], int]):
        self.add_event, self.find_places = add_event, find_places
        self.count_reductions = count_reductions
        self.is_measuring = True
        self.loaders = {}  # {(places and types): [[reference to the DataLoader, its facts]]}
        self.epochs = WeakKeyDictionary()  # {iterator: (its loader, facts and epoch)}
        self.counter = itertools.count()
        self.samplers = WeakKeyDictionary()  # {DistributedSampler: its number}
        self.set_samplers = set()  # DistributedSamplers after set_epoch(), before the epoch
        self.last_batches = {}  # {name of a loader: (its facts, its epoch, its last batch)}
        self.random_before = None  # the states of the random numbers before a batch is fetched
        self.evaluation = None  # the last one: (facts, place, reductions before its last batch)
        self.shares = {}  # {place of an evaluation: the share that this rank drew for itself}

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
        sampler, facts = loader.sampler, self.find_facts(loader)
        is_shuffled = isinstance(sampler, data.DistributedSampler) and sampler.shuffle
        epoch = {"indices": [], "used": False, "shuffled": is_shuffled,
                 "seed": sampler.seed + sampler.epoch if is_shuffled else None,
                 "is set": is_shuffled and sampler in self.set_samplers}
        if is_shuffled:
            epoch["sampler"] = self.samplers.setdefault(sampler, next(self.counter))
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
        if not iterator._num_workers:
            self.random_before = self.is_measuring and random_states()
        elif not loader.worker_init_fn and iterator._base_seed not in facts["seeds"]:
            facts["seeds"].append(iterator._base_seed)
        room = (RECORDED_INDICES if self.is_measuring else FEW) - len(epoch["indices"])
        if not isinstance(loader.sampler, (list, tuple)) and room > 0:
            indices = indices if isinstance(indices, (list, tuple)) else [indices]
            epoch["indices"] += indices_in_whole(loader.dataset, indices[:room])

    @never_raise
    def note_batch(self, batch, iterator):
        before, self.random_before = self.random_before, None
        if batch is None:  # the end of the epoch
            return
        _, facts, epoch = self.epochs[iterator]
        if not torch.is_grad_enabled():
            self.evaluation = facts, self.find_places()[0], self.count_reductions()
            return
        if before and not facts["stream"]:
            for name, state in random_states().items() - before.items():
                facts["noise"].setdefault(name, []).append(state)
        self.last_batches[facts["name"]] = facts, epoch, batch
        if threading.current_thread() is threading.main_thread():  # else in a random order
            first = next((part for part in tensors_in(batch) if part.dim()), ())
            self.add_event("draw", facts["name"], len(facts["epochs"]), size=len(first))

    def end_evaluation(self):
        """Record an evaluation of a share of the data, if no reduction or gather followed it."""
        if self.evaluation:
            (facts, place, reductions), self.evaluation = self.evaluation, None
            if (facts["shares"] or 1) > 1 and reductions == self.count_reductions():
                self.shares[place] = f"1/{facts['shares']} of {facts['dataset_size']:,} samples"

    def note_backward(self):
        """Record each loader's last batch: no backward pass used the earlier ones."""
        self.end_evaluation()
        for facts, epoch, batch in self.last_batches.values():
            epoch["used"] = True
            if self.is_measuring:
                facts["batches"].append(batch_checksums(batch))
        self.last_batches = {}

    def report(self, steps: int) -> list[dict]:
        """Return the facts of the loaders whose batches were used in half of the steps or more."""
        reports = []
        for _, loader in (entry for entries in self.loaders.values() for entry in entries):
            batches = len(loader["batches"])
            if batches and 2 * batches >= steps:
                epochs = [epoch for epoch in loader["epochs"] if epoch["used"]]
                if loader["seeds"] and draws_at_random(loader["dataset"]):
                    loader["noise"]["the workers'"] = loader["seeds"]
                facts = {key: value for key, value in loader.items() if key != "dataset"}
                reports.append(facts | {
                    "probes": probe(loader["dataset"]), "epochs": epochs})
        return reports


def describe(loader, name):
    """Return the facts of a DataLoader and its sampler."""
    stream, sampler = isinstance(loader.dataset, data.IterableDataset), loader.sampler
    is_distributed = isinstance(sampler, data.DistributedSampler)
    shares = [getattr(owner, name, None) for owner in (sampler, loader.batch_sampler)
              for name in SHARES]
    facts = {"name": name, "noise": {}, "seeds": [], "dataset": loader.dataset, "stream": stream,
             "dataset_size": size_of(loader.dataset), "length": size_of(loader),
             "sampler": type(sampler).__name__, "is_distributed": is_distributed,
             "batch_sampler": type(loader.batch_sampler) not in (data.BatchSampler, type(None)),
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


def draws_at_random(dataset):
    """Return True if a sample depends on the seed of the random numbers."""
    with suppress(Exception):  # as in probe()
        return sample_checksum(dataset, 0) != sample_checksum(dataset, 0, seed=1)
    return False


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
