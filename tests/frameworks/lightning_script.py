"""A Lightning script as its users write it: handwritten digits, one batch size per device."""

import argparse

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Digits(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def training_step(self, batch, index):
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=64, help="per device")
    parser.add_argument("--weights", default="digits.pt")
    args = parser.parse_args()

    L.seed_everything(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16), torch.tensor(labels))
    train, _ = torch.utils.data.random_split(data, [1436, 361])
    train_loader = DataLoader(train, args.batch_size, shuffle=True, drop_last=True)

    model = Digits()
    trainer = L.Trainer(max_epochs=1, devices=args.devices, precision="64-true", logger=False,
                        enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(model, train_loader)
    if trainer.is_global_zero:
        torch.save(model.state_dict(), args.weights)


if __name__ == "__main__":
    main()
