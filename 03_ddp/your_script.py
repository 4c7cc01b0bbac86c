"""Train a small network on handwritten digits, on one GPU or on the CPU.

    python your_script.py

An ordinary script, like one of yours. your_script_ddp.py does the same on many GPUs.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split


def load():
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images).float().reshape(-1, 1, 8, 8) / 16
    return random_split(TensorDataset(images, torch.tensor(labels)), [1437, 360])


def main():
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")

    train, test = load()
    train_loader = DataLoader(train, batch_size=64, shuffle=True,
                              drop_last=True, num_workers=2)
    test_loader = DataLoader(test, batch_size=64)

    model = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(16 * 6 * 6, 64), nn.ReLU(),
        nn.Linear(64, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    for epoch in range(5):
        model.train()
        loss_sum = 0.0
        for images, labels in train_loader:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            loss_sum += loss.item()
        print(f"epoch {epoch + 1}: loss {loss_sum / len(train_loader):.4f}")

    model.eval()
    correct = 0
    with torch.no_grad():
        for images, labels in test_loader:
            images, labels = images.to(device), labels.to(device)
            correct += (model(images).argmax(1) == labels).sum().item()
    print(f"test accuracy {correct / len(test):.4f}")
    torch.save(model.state_dict(), "digits.pt")


if __name__ == "__main__":
    main()
