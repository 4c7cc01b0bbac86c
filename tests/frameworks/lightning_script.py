"""A Lightning script as its users write it: handwritten digits, one batch size per device."""

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

RANKS = 1
BATCH = 64 // RANKS  # per device


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
    L.seed_everything(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16), torch.tensor(labels))
    train, _ = torch.utils.data.random_split(data, [1436, 361])
    train_loader = DataLoader(train, BATCH, shuffle=True, drop_last=True)

    model = Digits()
    trainer = L.Trainer(max_epochs=1, devices=RANKS, precision="64-true", logger=False,
                        enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(model, train_loader)
    if trainer.is_global_zero:
        torch.save(model.state_dict(), "digits.pt")


if __name__ == "__main__":
    main()
