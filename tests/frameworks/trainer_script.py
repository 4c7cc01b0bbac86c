"""A script for Hugging Face's Trainer: a tiny GPT predicts the pixels of handwritten digits."""

import torch
from sklearn.datasets import load_digits
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

RANKS = 1
BATCH = 64 // RANKS  # per device


def load():
    """Return the digits as texts of 64 tokens; background pixels are no targets."""
    images = torch.tensor(load_digits().data).long()
    labels = images.masked_fill(images == 0, -100)
    return [{"input_ids": image, "labels": label} for image, label in zip(images, labels)]


def main():
    set_seed(0)
    config = GPT2Config(vocab_size=17, n_positions=64, n_embd=16, n_layer=1, n_head=2,
                        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    model = GPT2LMHeadModel(config).double()
    data = load()
    arguments = TrainingArguments(
        output_dir="results", per_device_train_batch_size=BATCH, max_steps=8,
        learning_rate=0.01, optim="sgd", seed=0, save_strategy="no", report_to="none",
        disable_tqdm=True, dataloader_drop_last=True)
    trainer = Trainer(model, arguments, train_dataset=data[:1436])
    trainer.train()
    if trainer.is_world_process_zero():
        torch.save(model.state_dict(), "digits.pt")


if __name__ == "__main__":
    main()
