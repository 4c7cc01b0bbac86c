"""Keras 3: model.fit() with hvd.DistributedOptimizer silently fails to average gradients.

    mpiexec -n 2 python keras_trap.py

Every rank trains the same small network on its own random data, in two ways. After that, all ranks
should have the same weights. The program prints the largest difference between two ranks.
"""

import os

os.environ |= {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "2"}
import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import keras
import numpy as np
import tensorflow as tf

hvd.init()
tf.config.set_visible_devices([], "GPU")  # else each rank would reserve the memory of all GPUs
random = np.random.default_rng(hvd.rank())  # different data on each rank
images = random.normal(size=(256, 16)).astype("float32")
labels = random.normal(size=(256, 1)).astype("float32")


def build_model():
    keras.utils.set_random_seed(0)  # the same initial weights on each rank
    return keras.Sequential([
        keras.Input([16]), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)])


def with_fit(model):
    """Train as in Horovod's Keras documentation, without the lines that fail in Keras 3."""
    model.compile(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    model.fit(images, labels, batch_size=32, epochs=2, shuffle=False, verbose=0)


def with_tape(model):
    """Train as main_tf.py does."""
    optimizer = keras.optimizers.SGD(0.01)
    weights = model.trainable_variables
    for start in [*range(0, 256, 32)] * 2:
        batch = slice(start, start + 32)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(images[batch]) - labels[batch])**2)
        tape = hvd.DistributedGradientTape(tape)
        optimizer.apply(tape.gradient(loss, [weight.value for weight in weights]), weights)


for train in with_fit, with_tape:
    model = build_model()
    train(model)
    weights = np.concatenate([array.ravel() for array in model.get_weights()])
    all_weights = hvd.allgather(weights[None]).numpy()  # one row per rank
    if hvd.rank() == 0:
        difference = np.ptp(all_weights, axis=0).max()
        print(f"{train.__name__:9}: {hvd.size()} ranks, weights differ by up to {difference:.1e}")
