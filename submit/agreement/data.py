"""Records the samples that a rank trains on, drawn by DataLoaders or given to models."""

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    dataloader,
)

from .fingerprints import dataset_checksum, sample_checksums
from .hooks import never_raise, wrap_method

LONGEST = 10_000  # samples of an epoch whose numbers are recorded


class Data:
    """Records the samples used in each training step.

    The last batch that a loader returned before backward() counts as used.
    """

    def __init__(self):
        self.loaders = {}  # {id of a DataLoader: its facts}
        self.current = {}  # {id of a DataLoader: (its epoch, its last batch)}
        self.forwards = []  # (module, its arguments) since the last backward
        self.step_samples = []  # checksums in the current step: a list per backward

    def install(self):
        iterator = dataloader._BaseDataLoaderIter
        wrap_method(iterator, "__init__", before=self.begin_epoch)
        wrap_method(iterator, "_reset", before=self.begin_next_epoch)
        wrap_method(iterator, "_next_index", after=self.note_numbers)
        wrap_method(iterator, "__next__", after=self.note_batch)

    @never_raise
    def begin_epoch(self, iterator, loader, *_):
        facts = self.loaders.setdefault(id(loader), describe(loader))
        iterator.agree = loader, {"numbers": [], "used": False}
        facts["epochs"].append(iterator.agree[1])

    @never_raise
    def begin_next_epoch(self, iterator, loader, first_iter=False):
        """Begin an epoch of persistent workers, whose iterator is new in the first epoch only."""
        if not first_iter:
            self.begin_epoch(iterator, loader)

    @never_raise
    def note_numbers(self, index, iterator):
        loader, epoch = iterator.agree
        drawn = index if isinstance(index, (list, tuple)) else [index]
        if len(epoch["numbers"]) < LONGEST:
            epoch["numbers"] += [number_in_whole(loader.dataset, number) for number in drawn
                                 if hasattr(number, "__index__")]

    @never_raise
    def note_batch(self, batch, iterator):
        if batch is not None and torch.is_grad_enabled():
            loader, epoch = iterator.agree
            self.current[id(loader)] = epoch, batch

    @never_raise
    def note_forward(self, module, arguments):
        self.forwards.append((module, arguments))

    @never_raise
    def note_backward(self):
        """Record the last batches before this backward; earlier ones were only looked at."""
        for key, (epoch, batch) in self.current.items():
            epoch["used"] = True
            self.loaders[key]["batches"].append(sample_checksums(batch))
        self.current = {}
        given = [sample for module, arguments in self.forwards
                 if module is self.forwards[-1][0] for sample in sample_checksums(arguments)]
        self.forwards = []
        if given:
            self.step_samples.append(given)

    def report(self, steps: int) -> list[dict]:
        """Return the facts of the loaders that fed at least half of the optimizer's steps."""
        fed = [facts for facts in self.loaders.values() if 2 * len(facts["batches"]) >= steps]
        return [facts | {"epochs": [epoch["numbers"] for epoch in facts["epochs"]
                                    if epoch["used"]]} for facts in fed if facts["batches"]]


def describe(loader):
    """Return the facts of a DataLoader; "dealt": its sampler draws without replacement."""
    data = loader.dataset
    while hasattr(data, "dataset"):  # a Subset, or another wrapper
        data = data.dataset
    stream = isinstance(loader.dataset, IterableDataset)
    facts = {"items": 0 if stream else len(loader.dataset), "stream": stream, "epochs": [],
             "batches": [], "like": dataset_checksum(data), "dealt": False}
    sampler = loader.sampler
    if isinstance(sampler, DistributedSampler):
        facts |= {"dealt": True, "shuffle": sampler.shuffle, "ranks": sampler.num_replicas}
    elif type(loader.batch_sampler) is BatchSampler and type(sampler) in (
            RandomSampler, SequentialSampler, SubsetRandomSampler):
        facts["dealt"] = not getattr(sampler, "replacement", False)
    return facts


def number_in_whole(dataset, number):
    """Return the index in the whole data set of a sample of a subset."""
    if isinstance(dataset, Subset):
        return number_in_whole(dataset.dataset, dataset.indices[number])
    return int(number)
