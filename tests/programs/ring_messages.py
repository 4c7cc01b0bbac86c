"""Each message of a ring: `python ring_messages.py 02_horovod JSON`, a list of tensors' lengths."""

import json
import sys

import torch
import torch.distributed as dist

sys.path[0] = sys.argv[1]
from ring_allreduce import Wire, meet, part, ring  # noqa: E402

sent, isend = [], dist.isend


def noted(tensor, rank):
    sent.append([rank, tensor.nbytes])
    return isend(tensor, rank)


dist.isend = noted
rank, ranks = meet()
for numbers in json.loads(sys.argv[2]):
    sent.clear()
    tensor = torch.full((numbers,), 1.0 + rank)
    ring(tensor, Wire())
    print(json.dumps([rank, numbers, tensor.unique().tolist(), sent]) + "\n", end="")
part()
