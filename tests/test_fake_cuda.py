"""Mistakes that only a GPU shows, on a machine without one: see programs/fake_cuda.py."""

import json
import sys

from conftest import PROGRAMS, ROOT, copy_and_edit, run_command

LABELS = "            labels = labels.to(device, non_blocking=True)\n"
MISTAKES = {  # {mistake: (chapter, file, old text, new text, words of the report)}
    "labels on the CPU": (
        "01_single_node", "main.py", LABELS, "", "cpu"),
    "item() in a step": (
        "03_ddp", "main.py", "loss.detach())", "loss.detach() * loss.item())",
        "_local_scalar_dense"),
    "data on the GPU, indices on the CPU": (
        "03_ddp", "main.py", "    sampler = ",
        "    tensors = [torch.as_tensor(part).to(device) "
        "for part in (train.images, train.labels)]\n"
        "    type(train).__getitems__ = lambda _, indices: [part[indices] for part in tensors]\n"
        "    sampler = ", "aten::"),
    "a blocking copy": (
        "03_ddp", "main.py", LABELS, LABELS.replace(", non_blocking=True", ""), "aten::_to_copy"),
    "memory that is not pinned": (
        "03_ddp", "main.py", '"pin_memory": device.type == "cuda"', '"pin_memory": False',
        "aten::_to_copy"),
    "the GPU of the local rank": (
        "03_ddp", "main.py", "local_rank % torch.cuda.device_count()", "local_rank",
        "invalid device ordinal: 3 of 1"),
    "the GPU that DeepSpeed chooses": (
        "04_deepspeed", "workshop/ds_config.py",
        'os.environ["LOCAL_RANK"] = str(device.index)', "pass",
        "invalid device ordinal: 3 of 1"),
}


def test_chapters_run_on_a_gpu_and_mistakes_are_reported(tmp_path):
    """No step waits for the GPU or mixes CPU and GPU; a rank that sees one GPU takes number 0."""
    chapters = "01_single_node", "03_ddp", "04_deepspeed"
    originals = [ROOT / chapter / "main.py" for chapter in chapters]
    copies = []
    for number, (chapter, name, old, new, _) in enumerate(MISTAKES.values()):
        copy_and_edit(chapter, tmp_path / str(number), (old, new), name=name)
        copies.append(tmp_path / str(number) / "main.py")
    command = [sys.executable, PROGRAMS / "fake_cuda.py", "--max-steps", 3, *originals, *copies]
    result = run_command(command, timeout=120)
    reports = [json.loads(line) for line in result.out.splitlines() if line.startswith("[")]
    assert len(reports) == len(originals) + len(copies), result.err
    assert reports[:len(originals)] == [[None, {}]] * len(originals), result.out + result.err
    for (mistake, (*_, expected)), report in zip(MISTAKES.items(), reports[len(originals):]):
        assert expected in str(report), (mistake, report)
