"""Chapter 4: its configuration file, and what workshop/ds_config.py mends in DeepSpeed."""

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

from workshop import ds_config


@pytest.mark.check
@pytest.mark.parametrize("chapter", ["04_deepspeed", "05_zero"])
def test_gradients_are_not_clipped(chapter):
    """DeepSpeed's default, 1.0, would silently change the training."""
    config = json.loads((ROOT / chapter / "ds_config.json").read_text())
    assert config["gradient_clipping"] == 0


@pytest.mark.check
@pytest.mark.parametrize(("text", "precision", "message"), [
    ("[]", "fp32", "list"), ("{'a': 1}", "fp32", "line 1"),
    ('{"train_batch_size": 64, "scheduler": {}}', "fp32", "remove scheduler, train_batch_size"),
    ('{"bf16": true}', "fp32", "bf16 cannot be true"),
    ('{"bf16": {"enabled": "false"}}', "fp32", "bf16 cannot be .*false"),
    ('{"zero_optimization": {"stage3_max_live_parameters": "auto"}}', "fp32", '"auto" is for'),
    ('{"gradient_accumulation_steps": 0}', "fp32", "steps has to be 1 or more"),
    ('{"zero_optimization": {"stage": 3}}', "fp32", "chapter 5"),
    ('{"bf16": {"enabled": true}, "fp16": {"enabled": true}}', "fp32", "remove bf16 and fp16"),
    ('{"bf16": {"enabled": false}}', "bf16", "--precision sets bf16")])
def test_keys_and_values_without_their_effect_are_refused(text, precision, message, tmp_path):
    with pytest.raises(SystemExit, match=f"^ds_config.json: .*{message}"):
        read_ds_config(text, tmp_path, precision)


@pytest.mark.check
def test_precision_comes_from_the_file_or_the_flag(tmp_path):
    on = json.dumps({"bf16": {"enabled": True, "check_grad_overflow": False}})
    assert read_ds_config(on, tmp_path)[1] == "bf16"
    assert read_ds_config("{}", tmp_path, "bf16")[1] == "bf16"
    assert read_ds_config(on.replace("true", "false"), tmp_path)[1] == "fp32"
    config, precision = read_ds_config(on, tmp_path, "bf16")
    assert precision == "bf16" and config["bf16"] == json.loads(on)["bf16"]
    with pytest.raises(SystemExit, match=r"fp64.*fp32"):
        read_ds_config("{}", tmp_path, "fp64")


def read_ds_config(text, folder, precision="fp32"):
    """Return read_config() of this file and --precision."""
    path = folder / "ds_config.json"
    path.write_text(text)
    return ds_config.read_config(path, precision)


@pytest.mark.check
def test_adam_has_taken_no_step_before_training():
    """In bf16 DeepSpeed's stage 0 takes one with zero gradients: the next would be too small."""
    model = torch.nn.Linear(2, 2)
    adam = torch.optim.Adam(model.parameters())

    def initialize(model, optimizer):
        model(torch.zeros(1, 2)).sum().mul(0).backward()
        optimizer.step()
        return model, optimizer, None, None

    ds_config.initialize(SimpleNamespace(initialize=initialize), model=model, optimizer=adam)
    assert [state["step"] for state in adam.state.values()] == [0, 0]


@pytest.mark.check
def test_batchnorm_statistics_update_in_bf16():
    """Each update is smaller than bf16 resolution, yet after 200 steps they match fp32's."""
    fp32_norm, bf16_norm = (torch.nn.BatchNorm2d(2, momentum=0.001) for _ in range(2))
    bf16_norm.weight.data = bf16_norm.weight.bfloat16()
    bf16_norm.bias.data = bf16_norm.bias.bfloat16()
    ds_config.keep_statistics(bf16_norm, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    images = (3 * torch.randn(64, 2, 4, 4, generator=generator) + 5).bfloat16()
    for _ in range(200):
        fp32_norm(images.float())
        bf16_norm(images)
    bf16_norm.eval()(images)
    for name in "running_mean", "running_var":
        expected, value = getattr(fp32_norm, name), getattr(bf16_norm, name)
        assert value.dtype == torch.bfloat16
        assert torch.allclose(value.float(), expected, rtol=0.01), name
