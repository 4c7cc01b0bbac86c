"""Checks for exercise 4: the same script with Horovod."""

import torch
from runner import NotRun, horovodrun_variables
from scripts import MOMENTUM, build_model, check_data, check_training, run_script, same_tensors

LR, EPOCHS = 0.05, 2


def checks(file):
    try:
        import horovod.torch  # noqa: F401
    except ImportError:
        raise NotRun("Horovod is not installed: .venv/without-horovod says why; "
                     "the other exercises do not need it") from None
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), LR, MOMENTUM)
    for parameter in model.parameters():  # an earlier run's momentum
        optimizer.state[parameter]["momentum_buffer"] = 0.1 * torch.randn(parameter.shape)
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    _server, variables = horovodrun_variables(2)
    results = run_script(file, variables, checkpoint)
    yield from check_data(results)
    yield "all ranks start with the parameters that rank 0 has loaded", all(
        same_tensors(result["start"], checkpoint["model"]) for result in results), (
        "the ranks start with their own random weights: broadcast rank 0's after it has loaded "
        "start.pt")
    yield from check_training(
        results, LR, EPOCHS,
        "the ranks start equal and drift apart: is hvd.DistributedOptimizer the optimizer that "
        "steps? If so, what else does SGD's step depend on, which only rank 0 has loaded?",
        "are the gradients averaged, not summed? Keep epochs, learning rate and momentum "
        "unchanged. hvd.DistributedOptimizer returns a new optimizer with the parameters and rates "
        "of the old one, but not its state", checkpoint["optimizer"])
