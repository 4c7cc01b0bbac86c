"""What goes wrong on a GPU alone, without one: see programs/fake_cuda.py."""

import json
import sys

from conftest import PROGRAMS, ROOT, copy_of, execute

STEP = "images, labels = [part.to(device, non_blocking=True) for part in (images, labels)]"
MISTAKES = {  # chapter, file, what is replaced, by what, words of what is noticed
    "labels on the CPU": (
        "01_single_node", "main.py", STEP, "images = images.to(device, non_blocking=True)", "cpu"),
    "item() in a step": (
        "03_ddp", "main.py", "loss.detach())", "loss.detach() * loss.item())",
        "_local_scalar_dense"),
    "data on the GPU, indices on the CPU": (
        "03_ddp", "main.py", "    sampler = ",
        "    tensors = [torch.as_tensor(part).to(device) "
        "for part in (train.images, train.labels)]\n"
        "    type(train).__getitem__ = lambda _, indices: [part[indices] for part in tensors]\n"
        "    sampler = ", "aten::"),
    "a blocking copy": ("03_ddp", "main.py", ", non_blocking=True", "", "aten::_to_copy"),
    "memory that is not pinned": (
        "03_ddp", "main.py", 'pin_memory=device.type != "cpu"', "pin_memory=False",
        "aten::_to_copy"),
    "the GPU of the local rank": (
        "03_ddp", "main.py", "index(device.index)", "index(local_rank)",
        "invalid device ordinal: 3 of 1"),
    "DeepSpeed's own choice": (
        "04_deepspeed", "ds_config.py", 'os.environ["LOCAL_RANK"] = str(device.index)', "pass",
        "invalid device ordinal: 3 of 1"),
}


def test_the_chapters_fit_a_gpu_and_mistakes_do_not(tmp_path):
    """No step waits for the GPU or mixes it with the CPU; a rank that sees one takes number 0."""
    chapters = "01_single_node", "03_ddp", "04_deepspeed"
    right = [ROOT / chapter / "main.py" for chapter in chapters]
    wrong = []
    for chapter, name, old, new, _ in MISTAKES.values():
        copy_of(chapter, tmp_path / str(len(wrong)), (old, new), name=name)
        wrong.append(tmp_path / str(len(wrong)) / "main.py")
    words = [sys.executable, PROGRAMS / "fake_cuda.py", "--max-steps", 3, *right, *wrong]
    done = execute(words, timeout=120)
    answers = [json.loads(line) for line in done.out.splitlines() if line.startswith("[")]
    assert answers[:len(right)] == [[None, {}]] * len(right), done.out + done.err
    assert len(answers) == len(right) + len(wrong), done.err
    for (mistake, (*_, words)), answer in zip(MISTAKES.items(), answers[len(right):]):
        assert words in str(answer), (mistake, answer)
