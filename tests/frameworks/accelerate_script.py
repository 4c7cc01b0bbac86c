"""An accelerate script as its users write it: handwritten digits, one batch size per process."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

RANKS = 1
BATCH = 64 // RANKS  # per process


def main():
    accelerator = Accelerator()
    set_seed(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16), torch.tensor(labels))
    train, _ = random_split(data, [1436, 361])
    train_loader = DataLoader(train, BATCH, shuffle=True, drop_last=True,
                              generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, train_loader = accelerator.prepare(model, optimizer, train_loader)

    for images, labels in train_loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()

    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), "digits.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
