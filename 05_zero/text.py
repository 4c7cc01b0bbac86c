"""The text to train and test on, by default Python's own documentation; a model writes some."""

import argparse
import math
import sys
from pathlib import Path
from string import printable

import torch
from torch import nn
from torch.utils.data import TensorDataset


def load_text(args: argparse.Namespace, global_batch: int) -> tuple[TensorDataset, TensorDataset]:
    """Return the sequences to train on, and those of the text's last tenth, to test with.

    A sequence is a pair: its bytes, and the next byte for each of them; uint8, (context,) each.
    Sequences do not overlap, so that each byte (except the first) is predicted once per epoch.
    """
    if args.text == "synthetic":
        return make_sequences(args.context, global_batch)
    content = read_bytes(args.text)
    count = (len(content) - 1) // args.context
    test_count = max(1, count // 10)
    if global_batch > count - test_count:
        sys.exit(f"the text has {max(0, count - test_count)} sequences of {args.context} bytes to "
                 f"train on, fewer than the {global_batch} of a step: lower --batch-size or "
                 "--context, or use a longer --text, or --text synthetic")
    text = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    tokens = text[:count * args.context].view(count, args.context)
    next_tokens = text[1:count * args.context + 1].view(count, args.context)
    train, test = slice(count - test_count), slice(count - test_count, count)
    return (TensorDataset(tokens[train], next_tokens[train]),
            TensorDataset(tokens[test], next_tokens[test]))


def make_sequences(context, global_batch):
    """Return random letters for 50 steps per epoch, and for a step's test.

    Each sequence begins one letter after the one before, so that any number needs little memory.
    """
    if Path("synthetic").exists():
        sys.exit("--text synthetic: for random letters remove the file of this name; to train on "
                 "it, use --text ./synthetic")
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(97, 123, (51 * global_batch + context,), generator=generator).byte()
    sets = TensorDataset(text[:-1].unfold(0, context, 1), text[1:].unfold(0, context, 1))
    return (TensorDataset(*sets[:50 * global_batch]), TensorDataset(*sets[50 * global_batch:]))


def read_bytes(path):
    if path:
        try:
            return Path(path).read_bytes()
        except OSError as problem:
            sys.exit(f"--text {path}: {problem.strerror}")
    from pydoc_data.topics import topics  # what Python's help() prints about its language
    return "\n".join(topics[name] for name in sorted(topics)).encode()


@torch.no_grad()
def evaluate(model: nn.Module, test: TensorDataset, global_batch: int, rank: int, ranks: int,
             device: torch.device) -> torch.Tensor:
    """Return this rank's part of the test loss, in bits per byte: the sum over ranks is the loss.

    All ranks call the model equally often, because under FSDP they gather each block together.
    A rank that lacks sequences computes some a second time, without counting them.
    """
    nats = torch.zeros((), dtype=torch.float64, device=device)
    for first in range(0, len(test), global_batch):
        indices = torch.arange(first + rank, first + global_batch, ranks)
        tokens, next_tokens = (part.to(device).long() for part in test[indices % len(test)])
        next_tokens[indices >= len(test)] = -100  # cross_entropy ignores it
        logits = model(tokens).flatten(0, 1).double()
        nats += nn.functional.cross_entropy(logits, next_tokens.flatten(), reduction="sum")
    return nats / math.log(2) / test.tensors[0].numel()


@torch.no_grad()
def generate(model: nn.Module, start: torch.Tensor, length: int = 80) -> str:
    """Return text that follows the bytes of `start`, (context,). All ranks of a model call this.

    Each byte is drawn with the probability that the model gives it; all ranks draw the same.
    Bytes that are no printable ASCII become question marks.
    """
    generator = torch.Generator().manual_seed(0)
    text = start.long()
    for _ in range(length):
        logits = model(text[None, -len(start):])[0, -1].float().cpu()
        byte = torch.multinomial(logits.softmax(0), 1, generator=generator)
        text = torch.cat([text, byte.to(text.device)])
    written = bytes(text[len(start):].tolist()).decode("latin-1")
    return "".join(letter if letter in printable else "?" for letter in written)
