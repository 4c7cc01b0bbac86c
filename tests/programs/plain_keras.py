"""Chapter 1's network, images and order with Keras' own model.fit(): `python plain_keras.py CHAPTER FILE`."""

import sys

import keras
import numpy as np

chapter, file = sys.argv[1:]
sys.path[0] = chapter
import workshop  # noqa: E402

import main_tf  # noqa: E402

sys.argv = ["main_tf.py"]
args = workshop.parse_args("plain Keras")
args.batch_size = args.global_batch_size = 64
keras.utils.set_random_seed(0)
keras.config.set_floatx("float64")
(images, labels), _ = workshop.load_data(args)
images = np.float64(images).transpose(0, 2, 3, 1)
images = (images - images[:256].mean()) / images[:256].std()
model = main_tf.build_model("cnn", images)
model.compile(keras.optimizers.SGD(0.05, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
order = np.random.default_rng(0).permutation(len(images))[:22 * 64]
model.fit(images[order], labels[order], batch_size=64, shuffle=False, verbose=0)
np.save(file, np.concatenate([array.ravel() for array in model.get_weights()]))
