"""Records the samples that a rank trains on, drawn by DataLoaders or given to models."""

import torch
from torch.utils import data

from .fingerprints import dataset_checksum, sample_checksums
from .hooks import never_raise, wrap_method

RECORDED_INDICES = 10_000  # indices per epoch


class Data:
    """Hooks that record the samples used in each training step.

    The last batch that a loader returned before backward() counts as used.
    """

    def __init__(self):
        self.loaders = {}  # {id of a DataLoader: its facts}
        self.last_batches = {}  # {id of a DataLoader: (its epoch, its last batch)}
        self.forwards = []  # (module, its arguments) since the last backward
        self.step_samples = []  # checksums in the current step: a list per backward

    def install(self):
        iterator = data.dataloader._BaseDataLoaderIter
        wrap_method(iterator, "__init__", before=self.begin_epoch)
        wrap_method(iterator, "_reset", before=self.begin_next_epoch)
        wrap_method(iterator, "_next_index", after=self.note_indices)
        wrap_method(iterator, "__next__", after=self.note_batch)
        wrap_method(data.DistributedSampler, "set_epoch", after=self.note_set_epoch)

    @never_raise
    def note_set_epoch(self, _, sampler, *__):
        sampler.agree_epoch_is_set = True

    @never_raise
    def begin_epoch(self, iterator, loader, *_):
        facts = self.loaders.setdefault(id(loader), describe(loader))
        sampler = loader.sampler
        is_shuffled = isinstance(sampler, data.DistributedSampler) and sampler.shuffle
        is_list = isinstance(sampler, (list, tuple))  # of all indices of an epoch
        epoch = {"indices": [], "used": False, "is_list": is_list,
                 "seed": sampler.seed + sampler.epoch if is_shuffled else None,
                 "is set": is_shuffled and vars(sampler).pop("agree_epoch_is_set", False)}
        iterator.agree_epoch = loader, epoch
        facts["epochs"].append(epoch)
        if is_list and loader.batch_size:
            self.add_indices(loader, epoch, sampler)

    @never_raise
    def begin_next_epoch(self, iterator, loader, first_iter=False):
        """Begin an epoch of persistent workers, whose iterator is new in the first epoch only."""
        if not first_iter:
            self.begin_epoch(iterator, loader)

    @never_raise
    def note_indices(self, indices, iterator):
        loader, epoch = iterator.agree_epoch
        if not isinstance(indices, (list, tuple)):
            indices = [indices]
        if not epoch["is_list"]:
            self.add_indices(loader, epoch, indices)

    def add_indices(self, loader, epoch, indices):
        room = max(0, RECORDED_INDICES - len(epoch["indices"]))
        epoch["indices"] += [index_in_whole(loader.dataset, index) for index in indices[:room]
                             if hasattr(index, "__index__")]

    @never_raise
    def note_batch(self, batch, iterator):
        if batch is not None and torch.is_grad_enabled():
            loader, epoch = iterator.agree_epoch
            self.last_batches[id(loader)] = epoch, batch

    @never_raise
    def note_forward(self, module, arguments):
        self.forwards.append((module, arguments))

    @never_raise
    def note_backward(self):
        """Record each loader's last batch: no backward pass used the earlier ones."""
        for key, (epoch, batch) in self.last_batches.items():
            epoch["used"] = True
            self.loaders[key]["batches"].append(sample_checksums(batch))
        self.last_batches = {}
        samples = []
        for module, arguments in self.forwards:
            if module is self.forwards[-1][0]:
                samples += sample_checksums(arguments)
        self.forwards = []
        if samples:
            self.step_samples.append(samples)

    def report(self, steps: int) -> list[dict]:
        """Return the facts of the loaders whose batches were used in half of the steps or more."""
        reports = []
        for facts in self.loaders.values():
            batches = len(facts["batches"])
            if batches and 2 * batches >= steps:
                epochs = [epoch for epoch in facts["epochs"] if epoch["used"]]
                reports.append(facts | {"epochs": [epoch["indices"] for epoch in epochs],
                                        "seeds": [epoch["seed"] for epoch in epochs],
                                        "are set": [epoch["is set"] for epoch in epochs]})
        return reports


def describe(loader):
    """Return the facts of a DataLoader and its sampler."""
    whole = loader.dataset
    while hasattr(whole, "dataset"):  # a Subset, or another wrapper
        whole = whole.dataset
    stream = isinstance(loader.dataset, data.IterableDataset)
    facts = {"dataset_size": 0 if stream else len(loader.dataset), "stream": stream,
             "sampler": type(loader.sampler).__name__, "epochs": [], "batches": [],
             "dataset_checksum": dataset_checksum(whole), "without_replacement": False}
    sampler = loader.sampler
    if isinstance(sampler, data.DistributedSampler):
        facts |= {"without_replacement": True, "shuffle": sampler.shuffle,
                  "num_replicas": sampler.num_replicas}
    elif type(loader.batch_sampler) is data.BatchSampler and type(sampler) in (
            data.RandomSampler, data.SequentialSampler, data.SubsetRandomSampler):
        facts["without_replacement"] = not getattr(sampler, "replacement", False)
    elif isinstance(sampler, (list, tuple)):
        facts["without_replacement"] = len(set(sampler)) == len(sampler)
    return facts


def index_in_whole(dataset, index):
    """Return a sample's index in the whole data set, given its index in a subset."""
    while isinstance(dataset, data.Subset):
        index = dataset.indices[index]
        dataset = dataset.dataset
    return int(index)
