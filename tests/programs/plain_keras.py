"""Chapter 1's network, images and order in Keras' own model.fit(): `python plain_keras.py FILE`."""

import sys

import keras
import main_tf  # of chapter 1
import numpy as np
from sklearn.datasets import load_digits

keras.utils.set_random_seed(0)
keras.config.set_floatx("float64")
images, labels = load_digits(return_X_y=True)
chosen = np.arange(len(images)) % 5 != 0
images, labels = images[chosen].reshape(-1, 8, 8, 1), labels[chosen]
images = (images - images[:256].mean()) / images[:256].std()
steps, full = len(images) // 64, 0.3 * 64 / 256
warm_up = keras.optimizers.schedules.PolynomialDecay(full / steps, steps - 1, full)
model = main_tf.build_model("cnn", images)
model.compile(keras.optimizers.SGD(warm_up, momentum=0.9),
              keras.losses.SparseCategoricalCrossentropy(from_logits=True))
for epoch in range(2):
    order = np.random.default_rng(epoch).permutation(len(images))[:steps * 64]
    model.fit(images[order], labels[order], batch_size=64, shuffle=False, verbose=0)
np.save(sys.argv[1], np.concatenate([array.ravel() for array in model.get_weights()]))
