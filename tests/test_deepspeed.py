"""Chapter 4: what the configuration file decides, DeepSpeed's launcher, its checkpoints, and no compiler."""

import json
import re

import pytest
import torch
from conftest import BIN, OBSERVED, ROOT, copy_of, execute, load_module, numbers, observe, parameters, record, run
from forked import free_port
from test_equality import (
    GLOBAL_BATCH,
    ONE,
    SMOOTH,
    smooth,  # noqa: F401  a fixture
    train,
    trained,  # noqa: F401  the fixture that it uses
)
from tolerances import close, distance

FOUR = "04_deepspeed"


def configured(folder, text):
    """A copy of the chapter with another ds_config.json; its main.py."""
    copy_of(FOUR, folder)
    (folder / "ds_config.json").write_text(text if isinstance(text, str) else json.dumps(text))
    return folder / "main.py"


def expect_same(one, found):
    close("parameters, fp32", distance(found, one.parameters), one.bound)


@numbers
def test_accumulated_micro_batches_are_one_step(smooth, tmp_path):  # noqa: F811
    """2 ranks x 3 micro-batches of 8 images step as 48 images do."""
    main = configured(tmp_path, {"gradient_accumulation_steps": 3, "gradient_clipping": 0.0})
    done = observe(main, 2, tmp_path / "seen", "--batch-size", 8, "--epochs", 1, "--checkpoint", tmp_path / "c",
                   "--results", tmp_path / "results", env=SMOOTH)
    assert done.code == 0 and "batch: 8 a rank, 48 global" in done.out, done.err
    expect_same(smooth(ONE), parameters(tmp_path / "c"))
    assert json.loads((tmp_path / "results").read_text())["steps"] == 1437 // 48


@pytest.mark.check
@pytest.mark.parametrize("chapter", [FOUR, "05_zero"])
def test_no_gradient_is_clipped(chapter):
    """DeepSpeed's own default, 1.0, makes another training, and nothing says so."""
    assert json.loads((ROOT / chapter / "ds_config.json").read_text())["gradient_clipping"] == 0


@pytest.mark.parametrize(("text", "flags", "said"), [
    ('{"gradient_clipping": 0.0', "", "ds_config.json.*line 1 column"),
    ({"train_batch_size": 64}, "", "ds_config.json.*--batch-size"),
    ({"fp16": {"enabled": True}}, "", "fp16 needs a GPU"),
    ("[]", "", "has to be {"), ({"bf16": True}, "", "bf16 cannot be true"),
    ({"gradient_accumulation_steps": 0}, "", "steps is less than 1"),
    ({"gradient_accumulation_steps": "2"}, "", "steps cannot be .2."),
    ({}, "--precision fp64", "fp64.*fp32"),
], ids=str)
def test_a_configuration_that_cannot_be(text, flags, said, tmp_path):
    main = configured(tmp_path, text)
    done = run(str(main), 1, *flags.split())
    assert done.code == 2 and re.fullmatch(f"main.py: .*{said}.*\n", done.err), done.err


@pytest.mark.core
def test_resume_reaches_the_parameters_of_an_uninterrupted_run(smooth, tmp_path):  # noqa: F811
    """Without ZeRO a checkpoint continues with any number of ranks: an epoch on 2, the next on 3."""
    train(FOUR, 2, tmp_path, "--epochs", 1, env=SMOOTH)
    train(FOUR, 3, tmp_path, "--epochs", 2, "--resume", "--results", tmp_path / "results", env=SMOOTH)
    assert json.loads((tmp_path / "results").read_text())["steps"] == 29
    expect_same(smooth(ONE, 2), parameters(tmp_path / "checkpoint"))


def test_its_launcher_trains_the_same(smooth, tmp_path):  # noqa: F811
    done = execute([BIN / "deepspeed", "--num_gpus", 2, "--master_port", free_port(), OBSERVED, tmp_path,
                    ROOT / FOUR / "main.py", "--global-batch-size", GLOBAL_BATCH, "--epochs", 1, "--checkpoint",
                    tmp_path / "c"], env=SMOOTH)
    assert done.code == 0 and "ranks: 2," in done.out, done.err
    expect_same(smooth(ONE), parameters(tmp_path / "c"))


@pytest.mark.slow
def test_no_compiler_is_needed(tmp_path):
    """On a PATH without g++, and with an empty cache of compiled operators."""
    found = record(FOUR, 2, "--max-steps", 2, folder=tmp_path, launcher=True, env={
        "PATH": str(BIN), "CXX": "", "CC": "", "TORCH_EXTENSIONS_DIR": str(tmp_path / "compiled")})
    assert found["steps"] == 2 and not (tmp_path / "compiled").exists()


@pytest.mark.check
def test_batchnorm_s_statistics_move_in_bf16():
    """By less than a bf16 number can show in a step: after 200 of them they are those of plain fp32."""
    ds_config = load_module(ROOT / "04_deepspeed" / "ds_config.py")
    plain, norm = torch.nn.BatchNorm2d(2, momentum=0.001), torch.nn.BatchNorm2d(2, momentum=0.001)
    norm.weight.data, norm.bias.data = norm.weight.bfloat16(), norm.bias.bfloat16()  # as DeepSpeed casts them
    ds_config.keep_statistics(norm, torch.bfloat16)
    images = (3 * torch.randn(64, 2, 4, 4, generator=torch.Generator().manual_seed(0)) + 5).bfloat16()
    for _ in range(200):
        plain(images.float()), norm(images)
    norm.eval()(images)
    for name in "running_mean", "running_var":
        expected, value = getattr(plain, name), getattr(norm, name)
        assert value.dtype == torch.bfloat16 and torch.allclose(value.float(), expected, rtol=0.01), name
