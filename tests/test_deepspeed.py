"""Chapter 4: what the configuration file decides, DeepSpeed's launcher, its checkpoints, and no compiler."""

import json
import os
import re
import shutil

import pytest
from conftest import BIN, ROOT, execute, observe, parameters, record, run
from launch import command
from test_equality import (
    GLOBAL_BATCH,
    ONE,
    differences,
    reference,  # noqa: F401  a fixture
    train,
)

FOUR = "04_deepspeed"


def configured(folder, text):
    """A copy of the chapter with another ds_config.json; its main.py."""
    shutil.copy(ROOT / FOUR / "main.py", folder)
    (folder / "ds_config.json").write_text(text if isinstance(text, str) else json.dumps(text))
    return folder / "main.py"


def test_accumulated_micro_batches_are_one_step(reference, tmp_path):  # noqa: F811
    """2 ranks x 3 micro-batches of 8 images step as 48 images do."""
    main = configured(tmp_path, {"gradient_accumulation_steps": 3, "gradient_clipping": 0.0})
    done = observe(main, 2, tmp_path / "seen", "--batch-size", 8, "--epochs", 1, "--checkpoint", tmp_path / "c",
                   "--results", tmp_path / "results")
    assert done.code == 0 and "batch: 8 a rank, 48 global" in done.out, done.err
    difference, = differences(reference(ONE, "fp32")[:1], [parameters(tmp_path / "c")])
    assert difference <= 1e-5
    assert json.loads((tmp_path / "results").read_text())["steps"] == 1437 // 48


def test_the_default_of_gradient_clipping_makes_another_training(reference, tmp_path):  # noqa: F811
    """So the file says 0.0: DeepSpeed's own default is 1.0."""
    done = observe(configured(tmp_path, {}), 1, tmp_path / "seen", "--global-batch-size", GLOBAL_BATCH, "--epochs", 1,
                   "--checkpoint", tmp_path / "c")
    assert done.code == 0, done.err
    assert differences(reference(ONE, "fp32")[:1], [parameters(tmp_path / "c")])[0] > 1e-3


@pytest.mark.parametrize(("text", "flags", "said"), [
    ('{"gradient_clipping": 0.0', "", "ds_config.json.*line 1 column"),
    ("[]", "", "ds_config.json"),
    ({"train_batch_size": 64}, "", "ds_config.json.*--batch-size"),
    ({"gradient_accumulation_steps": 0}, "", "gradient_accumulation_steps: 0"),
    ({"gradient_clipping": "little"}, "", "ds_config.json.*little"),
    ({"zero_optimization": {"stage": 4}}, "", "ds_config.json.*stage"),
    ({"fp16": {"enabled": True}}, "", "fp16 needs a GPU"),
    ({"fp16": {"enabled": True}}, "--precision bf16", "contradict"),
    ({}, "--precision fp64", "fp64.*fp32"),
    (None, "", "ds_config.json.*No such file"),
], ids=str)
def test_a_configuration_that_cannot_be(text, flags, said, tmp_path):
    main = configured(tmp_path, text or {})
    if text is None:
        (tmp_path / "ds_config.json").unlink()
    done = execute(command(str(main), 2 if text == "[]" else 1, *flags.split()))
    assert done.code == 2 and len(done.err.splitlines()) == 1 and re.match(f"main.py: .*{said}", done.err), done.err


def test_resume_reaches_the_parameters_of_an_uninterrupted_run(reference, tmp_path):  # noqa: F811
    """Without ZeRO a checkpoint goes on with any number of ranks: 10 steps on 2, the rest of the epoch on 3."""
    flags = "--global-batch-size", GLOBAL_BATCH, "--checkpoint", tmp_path / "c"
    assert run(FOUR, 2, *flags, "--max-steps", 10).code == 0
    done = run(FOUR, 3, *flags, "--epochs", 1, "--resume")
    assert done.code == 0 and "steps: 10 of 29 done" in done.out, done.err
    assert differences(reference(ONE, "fp32")[:1], [parameters(tmp_path / "c")])[0] <= 1e-5


def test_a_broken_copy_is_noticed(reference, tmp_path):  # noqa: F811
    line = "DistributedSampler(train,"
    source = (ROOT / FOUR / "main.py").read_text()
    assert source.count(line) == 1
    main = configured(tmp_path, {"gradient_clipping": 0.0})
    main.write_text(source.replace(line, "DistributedSampler(train, 2, 0,"))
    found = train(main, 2, tmp_path / "seen", "--epochs", 1)
    assert differences(reference(ONE, "fp32")[:1], found)[0] > 1e-3


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_launchers(launcher, reference, tmp_path):  # noqa: F811
    starts = {"deepspeed": [BIN / "deepspeed", "--num_gpus", 2, "--master_port", 29000 + os.getpid() % 900],
              "torchrun": [BIN / "torchrun", "--nproc-per-node", 2]}
    done = execute([*starts[launcher], ROOT / FOUR / "main.py", "--global-batch-size", GLOBAL_BATCH, "--epochs", 1,
                    "--checkpoint", tmp_path / "c"])
    assert done.code == 0 and "ranks: 2," in done.out, done.err
    assert differences(reference(ONE, "fp32")[:1], [parameters(tmp_path / "c")])[0] <= 1e-5


def test_no_compiler_is_needed(tmp_path):
    """On a PATH without g++, and with an empty cache of compiled operators."""
    found = record(FOUR, 2, "--max-steps", 2, folder=tmp_path, env={
        "PATH": str(BIN), "CXX": "", "CC": "", "TORCH_EXTENSIONS_DIR": str(tmp_path / "compiled")})
    assert found["steps"] == 2 and not (tmp_path / "compiled").exists()
