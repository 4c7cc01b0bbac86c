"""Train on many ranks: from a one-GPU script to DistributedDataParallel.

As it is, `python exercise.py` trains on one rank. Change main() so that `torchrun --nproc-per-node
2 exercise.py` trains the same network with the same global batch on two. Then torchrun starts one
rank, too: `torchrun exercise.py`.
"""

import torch
from digits import build_model, load_data
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

torch.set_default_dtype(torch.float64)  # 16 digits, so that two trainings can be compared
EPOCHS, BATCH, LR, MOMENTUM = 2, 64, 0.1, 0.9  # BATCH: images per step


def main():
    torch.manual_seed(0)
    train, test = load_data()
    loader = DataLoader(train, BATCH, shuffle=True, drop_last=True)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), LR, MOMENTUM)

    for epoch in range(EPOCHS):
        model.train()
        losses = []
        for images, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {epoch + 1}: loss {sum(losses) / len(losses):.4f}")

    model.eval()
    with torch.no_grad():
        images, labels = test.tensors
        correct = (model(images).argmax(1) == labels).sum().item()
    print(f"test accuracy {correct / len(test):.4f}")
    torch.save(model.state_dict(), "digits.pt")


if __name__ == "__main__":
    main()
