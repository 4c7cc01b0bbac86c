"""Chapter 4: what its configuration file decides, and what it works without."""

import json

import pytest
import torch
from conftest import BIN, ROOT, copy_of, load_module, record, refused, run

FOUR = "04_deepspeed"


@pytest.mark.check
@pytest.mark.parametrize("chapter", [FOUR, "05_zero"])
def test_no_gradient_is_clipped(chapter):
    """DeepSpeed's own default, 1.0, makes another training, and nothing says so."""
    config = json.loads((ROOT / chapter / "ds_config.json").read_text())
    assert config["gradient_clipping"] == 0


@pytest.mark.parametrize(("config", "flags", "message"), [
    ({"train_batch_size": 64}, "", "ds_config.json.*--batch-size"),
    ({"fp16": {"enabled": True}}, "", "fp16 needs a GPU"),
    ([], "", "has to be {"), ({"bf16": True}, "", "bf16 cannot be true"),
    ({"gradient_accumulation_steps": 0}, "", "steps is less than 1"),
    ({"gradient_accumulation_steps": "2"}, "", "steps cannot be .2."),
    ({}, "--precision fp64", "fp64.*fp32")], ids=str)
def test_a_configuration_that_cannot_be(config, flags, message, tmp_path):
    main = copy_of(FOUR, tmp_path)
    main.with_name("ds_config.json").write_text(json.dumps(config))
    refused(run(main, 1, *flags.split()), message)


@pytest.mark.slow
def test_no_compiler_is_needed(tmp_path):
    """On a PATH without g++, and with an empty cache of compiled operators."""
    compiled = tmp_path / "compiled"
    env = {"PATH": str(BIN), "CXX": "", "CC": "", "TORCH_EXTENSIONS_DIR": str(compiled)}
    result = record(FOUR, 2, "--max-steps", 2, folder=tmp_path, launcher=True, env=env)
    assert result["steps"] == 2 and not compiled.exists()


@pytest.mark.check
def test_batchnorm_s_statistics_move_in_bf16():
    """By less than a bf16 number can show in a step: after 200 they are those of plain fp32."""
    ds_config = load_module(ROOT / FOUR / "ds_config.py")
    plain, norm = (torch.nn.BatchNorm2d(2, momentum=0.001) for _ in range(2))
    norm.weight.data, norm.bias.data = norm.weight.bfloat16(), norm.bias.bfloat16()
    ds_config.keep_statistics(norm, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    images = (3 * torch.randn(64, 2, 4, 4, generator=generator) + 5).bfloat16()
    for _ in range(200):
        plain(images.float())
        norm(images)
    norm.eval()(images)
    for name in "running_mean", "running_var":
        expected, value = getattr(plain, name), getattr(norm, name)
        assert value.dtype == torch.bfloat16
        assert torch.allclose(value.float(), expected, rtol=0.01), name
