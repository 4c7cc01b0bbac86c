"""Train a Keras model on many ranks with Horovod, in a loop in place of model.fit. Copy it.

    python main_tf.py                   # one rank
    mpiexec -n 2 python main_tf.py      # the same training on two ranks

The folder workshop has to be next to it; only its ranks.py is used.
"""

import faulthandler
import os

os.environ |= {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "2"}
import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from workshop.ranks import check_world_size, refuse, run


def main():
    # Ranks and device. A process chooses its GPU before TensorFlow's first operation.
    hvd.init()
    rank, world_size, local_rank = hvd.rank(), hvd.size(), hvd.local_rank()
    check_world_size(world_size)
    gpus = tf.config.list_physical_devices("GPU") if hvd.cuda_built() or hvd.rocm_built() else []
    gpus = [gpus[local_rank % len(gpus)]] if gpus else []  # %: index 0 if each rank sees one GPU
    tf.config.set_visible_devices(gpus, "GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)  # allocate as needed, not all at once
    keras.utils.set_random_seed(0)  # the same shuffle and initial weights on all ranks

    # Batch and data, as arrays. The last fifth is for the test, as in fit(validation_split=0.2).
    batch_size = 64  # of all ranks together
    if batch_size % world_size:  # the mean over the ranks would weight the images unequally
        refuse(f"{world_size} ranks cannot share {batch_size} images equally: start a number of "
               f"ranks that divides {batch_size}, or change batch_size")
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype(keras.config.floatx()) / 16
    train_size = len(images) - len(images) // 5
    x_train, y_train = images[:train_size], labels[:train_size]
    x_test, y_test = images[train_size:], labels[train_size:]

    # Model and optimizer. All ranks start with rank 0's variables.
    model = keras.Sequential([
        keras.Input([8, 8, 1]), keras.layers.Conv2D(16, 3, activation="relu"),
        keras.layers.Flatten(), keras.layers.Dense(10)])
    optimizer = keras.optimizers.Adam(0.001)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer.build(model.trainable_variables)
    state = model.weights + optimizer.variables
    hvd.broadcast_variables([variable.value for variable in state], root_rank=0)

    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))  # training: dropout, BatchNorm
        tape = hvd.DistributedGradientTape(tape)  # its gradient() averages over the ranks
        gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    @tf.function(reduce_retracing=True)
    def count_correct(x, y):
        return tf.math.count_nonzero(tf.argmax(model(x, training=False), 1) == y)

    # Training; after each epoch the ranks split the test images.
    for epoch in range(5):
        order = np.random.permutation(len(x_train))
        losses = []
        for start in range(0, len(order) - batch_size + 1, batch_size):
            # Horovod would wait forever for a rank that hangs. Each call restarts the timer.
            faulthandler.dump_traceback_later(1800, exit=True)
            indices = order[start:start + batch_size][rank::world_size]  # this rank's images
            losses.append(train_step(x_train[indices], y_train[indices]))
        loss = hvd.allreduce(tf.reduce_mean(losses))  # the mean over all ranks
        for variable in model.non_trainable_weights:  # use rank 0's BatchNorm statistics
            variable.assign(hvd.broadcast(variable.value, root_rank=0))
        correct = count_correct(x_test[rank::world_size], y_test[rank::world_size])
        correct = int(hvd.allreduce(correct, op=hvd.Sum))
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {loss:.4f}, test accuracy {correct / len(x_test):.4f}",
                  flush=True)
    faulthandler.cancel_dump_traceback_later()
    if rank == 0:
        model.save("digits.keras")


if __name__ == "__main__":
    run(main)
