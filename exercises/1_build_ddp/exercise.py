"""Build DistributedDataParallel, in four steps.

Each class averages a model's gradients over all ranks, and each is better than the one before it.
A training loop uses them in the same way:

    copy_parameters(model)
    averager = PerParameter(model)  # or Flat(model), Overlapped(model), Bucketed(model, 25_000_000)
    for images, labels in batches:
        loss = cross_entropy(model(images), labels)
        loss.backward()
        averager.finish()  # now each .grad is the mean over all ranks
        optimizer.step()
        optimizer.zero_grad()

Every parameter has a gradient in every step.
"""

import torch
import torch.distributed as dist


def copy_parameters(model):
    """Copy rank 0's parameters to all ranks."""
    for parameter in model.parameters():
        # Your line: which operation of dist copies one rank's tensor to all?
        raise NotImplementedError


class PerParameter:
    """One all-reduce for each parameter, after backward."""

    def __init__(self, model):
        self.parameters = list(model.parameters())

    def finish(self):
        for parameter in self.parameters:
            raise NotImplementedError  # your two lines


class Flat:
    """One all-reduce for all gradients, after backward."""

    def __init__(self, model):
        self.parameters = list(model.parameters())

    def finish(self):
        raise NotImplementedError  # your lines: flat = flatten(...), then its mean
        unflatten(flat, self.parameters)


class Overlapped:
    """One all-reduce for each parameter, during backward.

    autograd calls start(parameter) as soon as backward has computed this parameter's gradient.
    """

    def __init__(self, model):
        self.started = []  # pairs of a parameter and the handle of its all-reduce
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.start)

    def start(self, parameter):
        # Your lines: start an all-reduce, without waiting, and append to self.started.
        raise NotImplementedError

    def finish(self):
        # Your lines: wait for each, divide, and leave self.started empty for the next step.
        raise NotImplementedError


class Bucketed:
    """One all-reduce for each bucket, during backward, as soon as the bucket is full.

    A bucket is a list of parameters. Backward computes the last parameter's gradient first, so the
    first bucket begins with the last parameter. A bucket ends with the parameter that brings it to
    bucket_bytes or more; the last bucket may be smaller.
    """

    def __init__(self, model, bucket_bytes):
        self.buckets = []  # lists of parameters, in the order in which backward fills them
        self.bucket_of = {}  # parameter: its bucket's number
        # Your lines: fill both. parameter.nbytes is a parameter's bytes, and its gradient's.
        raise NotImplementedError
        self.missing = [len(bucket) for bucket in self.buckets]  # gradients still to come
        self.started = []  # triples: a bucket, its flat gradients, the handle of their all-reduce
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.start)

    def start(self, parameter):
        number = self.bucket_of[parameter]
        self.missing[number] -= 1
        # Your lines: if the bucket is full now, start its all-reduce.
        raise NotImplementedError

    def finish(self):
        # Your lines: wait, divide, unflatten, and prepare the next step.
        raise NotImplementedError


def flatten(parameters):
    """Return the gradients of these parameters as one vector."""
    return torch.cat([parameter.grad.flatten() for parameter in parameters])


def unflatten(flat, parameters):
    """Copy the vector's elements back into the gradients of these parameters."""
    parts = flat.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts):
        parameter.grad.copy_(part.view_as(parameter))
