"""ring_allreduce.py; each rank prints how many bytes torch sends from it to each other rank."""

import json
import os

import torch.distributed as dist

sent, isend = {}, dist.isend


def counted(tensor, rank):
    sent[rank] = sent.get(rank, 0) + tensor.numel() * tensor.element_size()
    return isend(tensor, rank)


dist.isend = counted
import ring_allreduce  # noqa: E402 - of chapter 2

ring_allreduce.main()
os.write(2, f"sent: {json.dumps([int(os.environ['RANK']), sent])}\n".encode())
