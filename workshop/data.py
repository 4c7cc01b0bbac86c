"""The data sets, as arrays in memory."""

import argparse
import socket
import sys
from importlib.util import find_spec

import numpy as np


class Images:
    """Images and labels in memory. With more labels than images, the images repeat.

    images: uint8, (n, channels, height, width); labels: int64.
    """

    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, indices):
        indices = np.asarray(indices)
        return self.images[indices % len(self.images)], self.labels[indices]

    __getitems__ = __getitem__  # what a DataLoader calls for a whole batch


def load_data(args: argparse.Namespace, global_batch: int) -> tuple[Images, Images]:
    """Return the training and the test images, as NumPy arrays."""
    if args.dataset == "digits":
        train, test = load_digits(args.image_size)
    elif args.dataset == "synthetic":
        train, test = make_images(args, global_batch)
    else:
        train, test = load_files(args)
    if "resnet" in getattr(args, "model", ""):  # a ResNet needs three channels
        for part in (train, test):
            n, _, height, width = part.images.shape
            part.images = np.broadcast_to(part.images, (n, 3, height, width))
    if global_batch > len(train):
        sys.exit(f"{args.dataset} has {len(train)} training images, fewer than the {global_batch} "
                 "of a step: lower --batch-size, or use --dataset synthetic")
    return train, test


def make_images(args, global_batch):
    """Return random images for 50 steps per epoch. At most 256 are different."""
    shape = (min(50 * global_batch, 256), 3, args.image_size, args.image_size)
    images = np.random.default_rng(args.seed).integers(256, size=shape, dtype=np.uint8)
    return [Images(images, np.arange(n) % len(images) % 10) for n in (50 * global_batch, 100)]


def load_digits(side: int = 8) -> tuple[Images, Images]:
    """Return scikit-learn's 1,797 digits, of 8 x 8 pixels, enlarged by repeating pixels.

    Importing scikit-learn would take a second.
    """
    package = find_spec("sklearn")
    if not package:
        sys.exit("--dataset digits needs scikit-learn: python -m pip install scikit-learn, or use "
                 "--dataset synthetic")
    folder, = package.submodule_search_locations
    rows = np.loadtxt(f"{folder}/datasets/data/digits.csv.gz", np.uint8, delimiter=",")
    images, labels = rows[:, :-1].reshape(-1, 1, 8, 8), rows[:, -1].astype(np.int64)
    pixels = np.arange(side) * 8 // side  # which of the 8 each of the new pixels repeats
    images = images[:, :, pixels[:, None], pixels]
    test = np.arange(len(images)) % 5 == 0
    return Images(images[~test], labels[~test]), Images(images[test], labels[test])


def load_files(args):
    """Return MNIST or SVHN. torchvision, or Keras in a TensorFlow program, downloads them."""
    socket.setdefaulttimeout(30)  # without a network a download may hang
    place = "$KERAS_HOME/datasets/mnist.npz (KERAS_HOME: ~/.keras)"
    keras = sys.modules.get("keras")
    if not keras:  # in one process TensorFlow and torchvision may crash
        from torchvision.datasets import MNIST, SVHN
        place = f"--data-dir {args.data_dir}"
    try:
        if keras:
            parts = keras.datasets.mnist.load_data()
            return [Images(images[:, None], labels.astype(np.int64)) for images, labels in parts]
        if args.dataset == "mnist":
            sets = [MNIST(args.data_dir, train, download=True) for train in (True, False)]
            return [Images(part.data.unsqueeze(1).numpy(), part.targets.numpy()) for part in sets]
        sets = [SVHN(args.data_dir, split, download=True) for split in ("train", "test")]
        return [Images(part.data, part.labels.astype(np.int64)) for part in sets]
    except Exception as problem:
        reason = " ".join(str(problem).split())[-300:]  # the end of the text names the reason
        sys.exit(f"{args.dataset} is missing or incomplete in {place}, and the download failed "
                 f"({reason}): run this once where there is a network, or use --dataset digits, "
                 "which needs none")
