"""Data parallelism is the same training: 1, 2, 3 and 4 ranks reach the same parameters.

All train with one global batch, and are compared with chapter 1 on one rank, which test_contract.py
compares with a plain loop.
"""

import json
import re

import forked
import pytest
import torch
from conftest import (
    BIN,
    GLOBAL_BATCH,
    ROOT,
    case,
    copy_of,
    execute,
    numbers,
    parameters,
    record,
    run,
    train,
)
from sklearn.datasets import load_digits
from tolerances import FP64, TIES, apart, close, distance

EPOCHS = 5
ONE, ONE_TF = "01_single_node", "01_single_node/main_tf.py"
HVD, HVD_TF, DDP, DS = "02_horovod/pytorch", "02_horovod/tensorflow", "03_ddp", "04_deepspeed"
BASE = {HVD: ONE, HVD_TF: ONE_TF, DDP: ONE}
DOUBLE = "--precision", "fp64"
SMOOTH = ["smooth.py"]
slow = pytest.mark.slow


def largest(one, other):
    """Return the largest difference of any parameter."""
    return float(abs(one - other).max())


# The baseline is a plain training loop

@numbers
@pytest.mark.parametrize(("chapter", "ranks"), [case(ONE, 1), case(DDP, 2)])
def test_a_chapter_is_a_plain_loop_of_pytorch(chapter, ranks, tmp_path):
    """Every image once per epoch, each epoch in a new order; --lr is for 256 images and warms up.

    So it is on several ranks: no image is seen by two ranks, and none is left out except those that
    do not fill a global batch.
    """
    batch, epochs = 80, 2
    record(chapter, ranks, "--batch-size", batch // ranks, "--lr", 0.3, "--warmup-epochs", 1,
           "--epochs", epochs, *DOUBLE, "--checkpoint", tmp_path / "c", folder=tmp_path)

    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    chosen = torch.arange(len(images)) % 5 != 0
    images, labels = images[chosen].reshape(-1, 1, 8, 8), labels[chosen]
    images = (images - images[:256].mean()) / images[:256].std(correction=0)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 32, 3), torch.nn.ReLU(), torch.nn.Conv2d(32, 64, 3), torch.nn.ReLU(),
        torch.nn.MaxPool2d(2), torch.nn.Flatten(), torch.nn.Linear(256, 128), torch.nn.ReLU(),
        torch.nn.Linear(128, 10)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0, momentum=0.9)
    step, steps = 0, len(images) // batch
    for epoch in range(epochs):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        for indices in order[:steps * batch].split(batch):
            step += 1
            optimizer.param_groups[0]["lr"] = 0.3 * batch / 256 * min(1, step / steps)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images[indices]), labels[indices]).backward()
            optimizer.step()
    plain = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy()
    close("parameters, fp64", largest(plain, parameters(tmp_path / "c")), FP64)


# Any number of ranks

@pytest.mark.parametrize(("chapter", "ranks"), [
    case(DDP, 1), case(DDP, 2, marks=[numbers]), case(DDP, 3, marks=[numbers]),
    case(DDP, 4, marks=[slow]), case(HVD, 2, marks=[numbers]), case(HVD, 4, marks=[slow]),
    case(HVD_TF, 2), case(HVD_TF, 4, marks=[slow])])
def test_ranks_agree_in_fp64(chapter, ranks, trained, tmp_path):
    same = train(chapter, ranks, tmp_path / "c", *DOUBLE, "--epochs", EPOCHS)
    one = trained(BASE[chapter], *DOUBLE, "--epochs", EPOCHS)
    close("parameters, fp64", largest(one, same), FP64)


@pytest.mark.parametrize(("chapter", "ranks"), [
    case(DDP, 2, marks=[numbers]), case(DS, 2, marks=[numbers]), case(DS, 4, marks=[slow])])
def test_ranks_agree_in_fp32_up_to_rounding(chapter, ranks, smooth, tmp_path):
    """DeepSpeed has no fp64."""
    one = smooth()
    same = train(chapter, ranks, tmp_path / "c", "--epochs", 1, hook=SMOOTH)
    close("parameters, fp32", distance(same, one.parameters), one.bound)


@numbers
def test_accumulated_micro_batches_are_one_step(smooth, tmp_path):
    """2 ranks x 3 micro-batches of 8 images step as 48 images do."""
    main = copy_of(DS, tmp_path / "copy")
    config = {"gradient_accumulation_steps": 3, "gradient_clipping": 0.0}
    main.with_name("ds_config.json").write_text(json.dumps(config))
    same = train(main, 2, tmp_path / "c", "--epochs", 1, "--results", tmp_path / "r", hook=SMOOTH)
    one, results = smooth(), json.loads((tmp_path / "r").read_text())
    assert (results["batch_size"], results["steps"]) == (8, 1437 // 48)
    close("parameters, fp32", distance(same, one.parameters), one.bound)


TWICE = ("            loss.backward()",
         "            other = int(step == rank == 0)\n"
         "            logits, labels = logits[[other, *range(1, len(labels))]], "
         "labels[[other, *range(1, len(labels))]]\n"
         "            loss = nn.functional.cross_entropy(logits, labels)\n"
         "            loss.backward()")
OPTIMIZER = "hvd.DistributedOptimizer(optimizer, model.named_parameters())"


@pytest.mark.parametrize(("chapter", "line", "changed", "same"), [
    case(DDP, "logits = ddp(", "logits = model(", False, id="DDP, gradients not averaged"),
    case(DDP, "(train, world_size, rank,", "(train, world_size, 0,", False,
         id="DDP, all ranks get the same images"),
    case(DDP, "loss.backward()", "(loss * (rank != 1)).backward()", False,
         id="DDP, one rank's gradients left out"),
    case(DDP, *TWICE, False, id="DDP, an image seen twice"),
    case(DDP, "seed(args.seed)", "seed(args.seed + rank)", True, id="DDP, other parameters"),
    case(HVD, OPTIMIZER, "optimizer", False, id="Horovod, gradients not averaged"),
    case(HVD, "seed(args.seed)", "seed(args.seed + rank)", True, id="Horovod, other parameters"),
    case(HVD_TF, "hvd.DistributedGradientTape(tape)", "tape", False, marks=[slow],
         id="TensorFlow, gradients not averaged")])
@numbers
def test_broken_copies_differ(chapter, line, changed, same, trained, tmp_path):
    """But the frameworks correct parameters that differ at the start."""
    main = copy_of(chapter, tmp_path / "copy", (line, changed))
    broken = train(main, 2, tmp_path / "c", *DOUBLE, "--epochs", 1)
    difference = largest(trained(BASE[chapter], *DOUBLE, "--epochs", 1), broken)
    check = close if same else apart
    check("parameters, fp64", difference, FP64)


# Resume, and other launchers

@pytest.mark.core
@pytest.mark.parametrize("chapter", [
    case(ONE), case(ONE_TF, marks=[slow]), case(HVD), case(HVD_TF, marks=[slow]), case(DDP)])
def test_resume_equals_an_uninterrupted_run(chapter, trained, tmp_path):
    """Stopped in the second epoch, and continued from its start on more ranks."""
    before, after = (1, 1) if chapter in (ONE, ONE_TF) else (2, 3)
    train(chapter, before, tmp_path / "c", *DOUBLE, "--max-steps", 40)
    resumed = train(chapter, after, tmp_path / "c", *DOUBLE, "--epochs", EPOCHS, "--resume",
                    "--results", tmp_path / "r")
    assert json.loads((tmp_path / "r").read_text())["steps"] == 4 * (1437 // 48)
    one = trained(BASE.get(chapter, chapter), *DOUBLE, "--epochs", EPOCHS)
    close("parameters, fp64", largest(one, resumed), FP64)


@pytest.mark.core
def test_deepspeed_resumes_on_another_number_of_ranks(smooth, tmp_path):
    """Without ZeRO: an epoch on 2, the next on 3."""
    train(DS, 2, tmp_path / "c", "--epochs", 1, hook=SMOOTH)
    resumed = train(DS, 3, tmp_path / "c", "--epochs", 2, "--resume", hook=SMOOTH)
    one = smooth(2)
    close("parameters, fp32", distance(resumed, one.parameters), one.bound)


def test_deepspeed_launcher_trains_as_mpiexec_does(tmp_path):
    flags = "--global-batch-size", GLOBAL_BATCH, "--epochs", 1, "--checkpoint"
    done = execute([BIN / "deepspeed", "--num_gpus", 2, "--master_port", forked.free_port(),
                    ROOT / DS / "main.py", *flags, tmp_path / "c"])
    assert done.code == 0 and "ranks: 2," in done.out, done.err
    same = train(DS, 2, tmp_path / "same", "--epochs", 1)
    assert (parameters(tmp_path / "c") == same).all()  # a sum over two ranks has only one order


# BatchNorm

@pytest.mark.parametrize("chapter", [case(HVD), case(DDP)])
def test_resnet_is_evaluated_with_rank_0_statistics(chapter, tmp_path):
    """BatchNorm's running statistics differ by rank; evaluation uses those that rank 0 saves."""
    flags = ("--model", "resnet18", "--epochs", 1, "--global-batch-size", 240,
             "--checkpoint", tmp_path / "c")
    right = []
    for ranks, resume in (2, []), (1, ["--resume"]):
        done = run(chapter, ranks, *flags, *resume)
        assert done.code == 0, done.err
        right.append(int(re.search(r"\((\d+) of 360", done.out)[1]))
    assert abs(right[0] - right[1]) <= TIES
