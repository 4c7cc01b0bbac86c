"""05_zero/two_d.py trains as one rank does, and sends the bytes of the formula."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, assert_refused, load_module, numbers, read_records, run
from tolerances import FP64, assert_close

from cluster.parameters import read_rank_files

TWO_D, FSDP = "05_zero/two_d.py", "05_zero/fsdp.py"
LAYERS, WIDTH, HEADS, CONTEXT, BATCH = 2, 16, 4, 8, 12  # BATCH: the global batch
TEXT = (ROOT / "LICENSE").read_bytes()[:521]  # 65 sequences, of which the last 6 are for the test
SEQUENCES, LEARNING_RATE = 59, 2.0  # high, because the smooth variant's Adam hardly rescales
STEPS = SEQUENCES // BATCH  # in an epoch
ALL_REDUCE = 2  # sends twice what an all-gather or a reduce-scatter does


def train(program, ranks, folder, epochs, *flags):
    """Train the smooth variant in fp64. Return its record and its parameters by name."""
    (folder / "text").write_bytes(TEXT)
    result = run(program, ranks, "--text", folder / "text", "--layers", LAYERS, "--width", WIDTH,
                 "--heads", HEADS, "--context", CONTEXT, "--global-batch-size", BATCH,
                 "--lr", LEARNING_RATE, "--precision", "fp64", "--epochs", epochs,
                 "--checkpoint", folder / "c", "--results", folder / "results", *flags,
                 hook=["smooth.py"])
    assert result.code == 0, result.err
    subfolder = (folder / "c" / "latest").read_text()
    return read_records(folder / "results")[-1], read_rank_files(folder / "c" / subfolder)


@pytest.fixture(scope="module")
def two_by_two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_by_two")
    record, parameters = train(TWO_D, 4, folder, 1, "--tensor", 2)
    return SimpleNamespace(folder=folder, record=record, parameters=parameters)


def plain_loop(epochs):
    """Return the last epoch's mean loss in bits, and the parameters, of a loop on one device."""
    transformer = load_module(ROOT / Path(FSDP).with_name("transformer.py"))
    text = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8).long()
    tokens, next_tokens = (part.view(-1, CONTEXT) for part in (text[:-1], text[1:]))
    torch.manual_seed(0)
    model = torch.nn.Sequential(*transformer.parts(LAYERS, WIDTH, HEADS, CONTEXT)).double()
    rate = LEARNING_RATE * (BATCH / 256) ** 0.5
    adam = torch.optim.Adam(model.parameters(), lr=rate, eps=1.0)
    for epoch in range(epochs):
        order = torch.randperm(SEQUENCES, generator=torch.Generator().manual_seed(epoch))
        losses = []
        for batch in order[:STEPS * BATCH].split(BATCH):
            adam.zero_grad()
            loss = torch.nn.functional.cross_entropy(
                model(tokens[batch]).flatten(0, 1), next_tokens[batch].flatten())
            loss.backward()
            adam.step()
            losses.append(loss.item() / math.log(2))
    return sum(losses) / STEPS, dict(model.named_parameters())


def assert_equal(parameters, expected):
    assert parameters.keys() == expected.keys()
    for name, value in expected.items():
        difference = (parameters[name] - value).abs().max().item()
        assert_close(f"{name}, fp64", difference, FP64)


@pytest.mark.core
@numbers
def test_two_by_two_ranks_train_as_a_plain_loop(two_by_two):
    loss, parameters = plain_loop(epochs=1)
    assert_close("loss, fp64, relative", abs(two_by_two.record["loss"] / loss - 1), FP64)
    assert_equal(two_by_two.parameters, parameters)


@pytest.mark.slow
@pytest.mark.parametrize("tensor_ranks", [1, 2])
def test_each_dimension_alone_trains_as_a_plain_loop(tensor_ranks, tmp_path):
    record, parameters = train(TWO_D, 2, tmp_path, 1, "--tensor", tensor_ranks)
    assert_equal(parameters, plain_loop(epochs=1)[1])
    unused_dimension = "data" if tensor_ranks == 2 else "tensor"
    assert record["sent"][unused_dimension] == [0, 0]


def test_each_dimension_sends_the_bytes_of_the_formula(two_by_two):
    """With two ranks in each dimension, a ring's all-gather sends half of the whole tensor."""
    norms, row_biases = (2 * LAYERS + 1) * 2 * WIDTH, 2 * LAYERS * WIDTH  # on all ranks of a group
    part = (two_by_two.record["parameters"] - norms - row_biases) // 2 + norms + row_biases
    tokens = BATCH // 2 * CONTEXT
    sizes = [tokens * WIDTH] * (8 * LAYERS + 4)  # 4: of the embedding and the head
    sizes += [CONTEXT * WIDTH] * 2 + [tokens * 256]  # positions; logits
    sizes += [ALL_REDUCE * WIDTH] * 2 * (2 * LAYERS + 1)  # gradients of the norms
    assert two_by_two.record["sent"] == {
        "data": [8 * 3 * part // 2, 3 * (LAYERS + 2)],  # gathered twice, gradients reduced once
        "tensor": [8 * sum(sizes) // 2, len(sizes)]}


@numbers
def test_fsdp_continues_on_one_rank(two_by_two):
    _, parameters = train(FSDP, 1, two_by_two.folder, 2, "--resume")
    assert_equal(parameters, plain_loop(epochs=2)[1])


@pytest.mark.parametrize(("ranks", "flags"), [
    (1, "--tensor 2"), (2, "--tensor 2 --heads 3")])
def test_mistakes_get_one_line(ranks, flags):
    assert_refused(run(TWO_D, ranks, *flags.split()), "--tensor 2 has to divide --heads, --context")
