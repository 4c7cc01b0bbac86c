"""Chapter 1's network, images and order with Keras' own model.fit(): `python plain_keras.py FILE`."""

import sys

import keras
import numpy as np
import workshop  # this and main_tf are chapter 1's

import main_tf

file = sys.argv.pop()
args = workshop.parse_args("plain Keras")
args.batch_size = args.global_batch_size = 64
keras.utils.set_random_seed(0)
keras.config.set_floatx("float64")
(images, labels), _ = workshop.load_data(args)
images = np.float64(images).transpose(0, 2, 3, 1)
images = (images - images[:256].mean()) / images[:256].std()
steps, full = len(images) // 64, 0.3 * 64 / 256
warm_up = keras.optimizers.schedules.PolynomialDecay(full / steps, steps - 1, full)
model = main_tf.build_model("cnn", images)
model.compile(keras.optimizers.SGD(warm_up, momentum=0.9),
              keras.losses.SparseCategoricalCrossentropy(from_logits=True))
for epoch in range(2):
    order = np.random.default_rng(epoch).permutation(len(images))[:steps * 64]
    model.fit(images[order], labels[order], batch_size=64, shuffle=False, verbose=0)
np.save(file, np.concatenate([array.ravel() for array in model.get_weights()]))
