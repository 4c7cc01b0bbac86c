"""agree.py against scripts with one mistake each, and against good ones, on two real ranks."""

import re

import forked
import pytest
from conftest import ROOT, copy_of, environment

AGREE = ROOT / "submit" / "agree.py"
WORKERS = re.search(r"num_workers=.*?\)", (ROOT / "03_ddp" / "your_script_ddp.py").read_text(), re.S).group()
QUICK = (WORKERS, "num_workers=0)")
LOADER = "sampler=sampler,  # DDP: instead of shuffle=True"
WRAP = "ddp = nn.parallel.DistributedDataParallel(model)  # DDP: without device_ids, see set_device"
STEP = "            optimizer.step()\n"
BY_HAND = """            for parameter in model.parameters():
                torch.distributed.all_reduce(parameter.grad)
                parameter.grad /= ranks
"""
SEEDED = ("torch.manual_seed(0)", "torch.manual_seed(rank)")
BARE = (WRAP, "ddp = model")
BROKEN = {  # what is changed in a good script: the findings
    "no wrapper": ([BARE], {"own gradients", "apart"}),
    "the wrapper is by-passed": ([("ddp(images)", "model(images)")], {"own gradients", "apart"}),
    "no_sync in every step": ([("            loss = cross_entropy(ddp(images), labels)  # DDP: ddp, not model\n"
                                "            loss.backward()\n", "            with ddp.no_sync():\n                loss = "
                                "cross_entropy(ddp(images), labels)\n                loss.backward()\n")],
                              {"own gradients", "apart"}),
    "no sampler": ([(LOADER, "shuffle=True,")], {"same data"}),
    "no sampler, a seed a rank": ([SEEDED, (LOADER, "shuffle=True,"), ("model = nn", "torch.manual_seed(0)\n    model = nn"),
                                   ("    for epoch in range(5):", "    torch.manual_seed(rank)\n    for epoch in range(5):")],
                                  {"overlap"}),
    "a sampler for one rank": ([("DistributedSampler(train, drop_last=True)",
                                 "DistributedSampler(train, num_replicas=1, rank=0, drop_last=True)")],
                               {"sampler", "same data"}),
    "set_epoch is forgotten": ([("sampler.set_epoch(epoch)", "pass")], {"order"}),
    "a sum by hand": ([BARE, (STEP, BY_HAND.replace("                parameter.grad /= ranks\n", "") + STEP)], {"sum"}),
    "averaged twice": ([(STEP, "            for parameter in model.parameters():\n                parameter.grad /= ranks\n"
                         + STEP)], {"twice"}),
    "nobody broadcasts": ([SEEDED, BARE, (STEP, BY_HAND + STEP), ("def load():", "def load():\n    torch.manual_seed(0)"),
                           ("    train, test = load()", "    train, test = load()\n    torch.manual_seed(rank)")], {"weights"}),
    "gradients are broadcast": ([BARE, (STEP, BY_HAND.replace("all_reduce(parameter.grad)", "broadcast(parameter.grad, 0)")
                                        .replace("                parameter.grad /= ranks\n", "") + STEP)], {"one rank's"}),
    "a layer is forgotten": ([BARE, (STEP, BY_HAND.replace("model.parameters()", "list(model.parameters())[:-2]") + STEP)],
                             {"part", "apart"}),
    "a rate a rank": ([("lr=0.05", "lr=0.05 * (1 + rank)")], {"apart"}),
    "unequal shares": ([("batch_size=64 // ranks", "batch_size=32 if rank else 48")], {"batches"}),
    "a rank leaves the loop": ([("            images, labels = images.to(device), labels.to(device)\n            optimizer.zero",
                                 "            if rank and loss_sum > 4:\n                break\n            images, labels = "
                                 "images.to(device), labels.to(device)\n            optimizer.zero")], {"hang"}),
    "rank 0 alone asks all": ([("            loss_sum += loss.item()", "            loss_sum += loss.item()\n"
                                "            if rank == 0:\n                torch.distributed.barrier()")], {"hang"}),
    "clipped by each rank": ([BARE, (STEP, "            nn.utils.clip_grad_norm_(model.parameters(), 0.1 * (rank + 1))\n"
                                     + BY_HAND + STEP)], {"other gradients"}),
}
GOOD = {
    "as it is": [], "by hand": [BARE, (STEP, BY_HAND + STEP)],
    "clipped": [(STEP, "            nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n" + STEP)],
    "Adam": [("torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)", "torch.optim.Adam(model.parameters())")],
    "fp64": [(".float()", ".double()"), ("10)).to(device)", "10)).double().to(device)")],
}


def agree(tmp_path, changes, *flags):
    script = copy_of("03_ddp", tmp_path, QUICK, *changes, name="your_script_ddp.py")
    done = forked.run([AGREE, "--timeout", 6, *flags, script], 2, environment(), timeout=60)
    wrong = set(re.findall(r"^WRONG: ([^:]+):", done.out, re.M))
    return done, wrong


@pytest.mark.parametrize("name", BROKEN)
def test_each_mistake_has_its_verdict(name, tmp_path):
    changes, expected = BROKEN[name]
    done, wrong = agree(tmp_path, changes)
    assert wrong == expected and done.code == 1, done.out + done.err


@pytest.mark.parametrize("name", GOOD)
def test_a_good_script_is_let_alone(name, tmp_path):
    done, wrong = agree(tmp_path, GOOD[name])
    assert not wrong and done.code == 0 and "nothing wrong was found" in done.out, done.out + done.err
