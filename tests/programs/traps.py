"""Run lines of YOUR_SCRIPT_TRAPS.md: `python traps.py PAGE SCRIPT`. Gradients are one rank's.

SCRIPT: the one that has `gather`. With warnings as errors, nothing in these lines is deprecated.
"""

import re
import runpy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

PAGE, SCRIPT = map(Path, sys.argv[1:])
gather = runpy.run_path(str(SCRIPT))["gather"]


def codes(title):
    """Return the code in a bullet of the page."""
    bullet = re.search(rf"^- \*\*{title}.*?(?=^- )", PAGE.read_text(), re.S | re.M)[0]
    return [" ".join(code.split()) for code in re.findall("`(.*?)`", bullet, re.S)]


def quotient(outputs, labels, total):
    shares = outputs.sigmoid()[:, 0]
    return 1 - 2 * total((shares * labels).sum()) / total((shares + labels).sum())


def comparison(features):
    return cross_entropy(features @ features.roll(1, 0).T, torch.arange(len(features)))


def check(backward, loss, whole_loss):
    """Compare the model's gradient with that of all samples on one rank."""
    expected = torch.autograd.grad(whole_loss, [*model.parameters()])
    model.zero_grad()
    exec(backward, globals() | {"loss": loss})
    for parameter, gradient in zip(model.parameters(), expected):
        assert torch.allclose(parameter.grad, gradient, 1e-12, 1e-12), (backward, parameter.grad)


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs, labels = torch.randn(8, 3).double(), torch.rand(8).double()
model = nn.Sequential(nn.Linear(3, 2), nn.Tanh()).double()
ddp = DistributedDataParallel(model)
outputs, own_labels = ddp(inputs.chunk(world_size)[rank]), labels.chunk(world_size)[rank]
total, backward = codes("A quotient of sums")
check(backward, quotient(outputs, own_labels, lambda x: eval(total, globals() | {"x": x})),
      quotient(model(inputs), labels, lambda x: x))

*lines, backward = codes("A comparison within the batch")
variables = globals() | {"x": ddp(inputs.chunk(world_size)[rank])}
exec("\n".join(lines), variables)
check(backward, comparison(torch.cat(variables["parts"])), comparison(model(inputs)))

norm = DistributedDataParallel(nn.BatchNorm1d(3).double(), forward_sync_buffers=False)
(norm(inputs).mul(labels[:, None]).sum() + norm(inputs + 1).square().sum()).backward()
del ddp, norm
dist.destroy_process_group()
