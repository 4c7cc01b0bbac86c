"""The images per second of a plain loop, with each setting of chapter 1's page."""

import time

import torch
from torchvision.models import resnet18, resnet50

WARM_UP = 5
SETTINGS = ("TF32", "TF32, channels last", "bf16", "bf16, channels last",
            "bf16, channels last, compile")


def images_per_second(build_model, device, image_size, batch, steps, settings):
    """Train a ResNet on one batch."""
    layout = torch.channels_last if "channels last" in settings else torch.contiguous_format
    model = build_model(num_classes=10).to(device, memory_format=layout)
    images = torch.randn(batch, 3, image_size, image_size, device=device).to(memory_format=layout)
    labels = torch.randint(10, (batch,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), 0.001, 0.9)
    if "compile" in settings:
        model.compile()
    loss = torch.zeros(())
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            loss.item()  # waits for the GPU
            start_time = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled="bf16" in settings):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    loss.item()
    return round(batch * steps / (time.perf_counter() - start_time))


def speed(jobs):
    """How fast does one device train ResNet-50, on a CPU ResNet-18, with each setting?"""
    torch.set_float32_matmul_precision("high")  # TF32; PyTorch's default for convolutions
    torch.backends.cudnn.benchmark = not torch.version.hip  # AMD's search takes minutes
    case = (resnet50, "cuda", 224, 256, 30)
    if jobs.device == "cpu":
        case = (resnet18, "cpu", 32, 8, 2)
    for settings in SETTINGS:
        yield {"settings": settings, "images/s": images_per_second(*case, settings)}
