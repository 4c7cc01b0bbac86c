"""Train an image classifier on many devices with TensorFlow and Horovod.

    mpiexec -n 2 python main_tf.py      # or srun --mpi=pmi2, or horovodrun --gloo; python: one rank

A loop replaces model.fit. Copy this file together with the folder workshop.
"""

import faulthandler
import os

os.environ |= {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "2"}
import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from workshop import data, flags
from workshop.ending import run
from workshop.ranks import check_world_size, refuse
from workshop.report import Report


def build_model(image_shape: tuple[int, ...]) -> keras.Model:
    return keras.Sequential([
        keras.Input(image_shape), keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.Conv2D(64, 3, activation="relu"), keras.layers.MaxPooling2D(),
        keras.layers.Flatten(), keras.layers.Dense(128, activation="relu"),
        keras.layers.Dense(10)])


def main():
    # Ranks and device. A process chooses its GPU before TensorFlow's first operation.
    hvd.init()  # all ranks connect here, over MPI or gloo
    rank, world_size, local_rank = hvd.rank(), hvd.size(), hvd.local_rank()
    check_world_size(world_size)
    parser = flags.Parser(__doc__)
    parser.add_argument("--dataset", choices=("digits", "mnist"), default="digits")
    parser.add_argument("--image-size", type=int, help="height and width of the digits (8)")
    flags.add_training_flags(parser, 0.2, "images", batch_size=64, epochs=5)
    args = parser.parse_args()
    if args.precision == "bf16" or args.resume or args.warmup_epochs:
        refuse("this program has no --precision bf16, --resume or --warmup-epochs")
    supports_gpus = args.device != "cpu" and (hvd.cuda_built() or hvd.rocm_built())
    gpus = tf.config.list_physical_devices("GPU") if supports_gpus else []
    if 1 < len(gpus) < hvd.local_size():
        refuse("more ranks than GPUs on a node: start one rank per GPU, or use --device cpu")
    gpus = [gpus[local_rank % len(gpus)]] if gpus else []  # %: index 0 if each rank sees one GPU
    if args.device == "gpu" and not gpus:
        refuse("--device gpu: no GPU, or a TensorFlow or Horovod without GPUs: use --device cpu")
    tf.config.set_visible_devices(gpus, "GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)  # allocate as needed, not all at once
    keras.config.set_floatx("float64" if args.precision == "fp64" else "float32")
    keras.utils.set_random_seed(args.seed)

    # Batch and data: shuffled every epoch and split among the ranks; leftover images are dropped.
    global_batch = args.global_batch_size or world_size * args.batch_size
    batch = global_batch // world_size  # per rank; flags.check() refuses a remainder
    device = "cuda" if gpus else "cpu"
    flags.check(args, device, global_batch, world_size)
    if rank > 0:
        hvd.allreduce(tf.zeros([]))  # wait until rank 0, which may download, has loaded the data
    train, test = data.load_data(args, global_batch)
    if rank == 0:
        hvd.allreduce(tf.zeros([]))
    mean, std = float(train.images[:256].mean()), float(train.images[:256].std())
    x_train, x_test = [  # standardised; TensorFlow on CPUs needs the channels last
        np.moveaxis((part.images.astype(keras.config.floatx()) - mean) / std, 1, -1)
        for part in (train, test)]

    # Model and optimizer. All ranks start with rank 0's variables.
    model = build_model(x_train.shape[1:])
    lr = args.lr * global_batch / 256  # linear scaling rule: twice the batch, twice the rate
    optimizer = keras.optimizers.SGD(lr, momentum=0.9)
    optimizer.build(model.trainable_variables)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    state = model.weights + optimizer.variables
    hvd.broadcast_variables([variable.value for variable in state], root_rank=0)

    @tf.function
    def train_step(images, labels):
        with tf.GradientTape() as tape:
            logits = model(images, training=True)  # training: dropout, BatchNorm
            loss = loss_fn(labels, logits)
        tape = hvd.DistributedGradientTape(tape)  # its gradient() averages over the ranks
        gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
        optimizer.apply(gradients, model.trainable_variables)
        return loss, tf.argmax(logits, 1) == labels

    # Training: each rank has its own batch; averaged gradients keep all parameters identical.
    step, epoch_steps = 0, len(train) // global_batch
    last_step = min(args.epochs * epoch_steps, args.max_steps)
    report = Report(args, rank, chapter="02_horovod/main_tf.py", ranks=world_size, device=device,
                    nodes=hvd.cross_size(), model="cnn", parameters=model.count_params(),
                    dataset=args.dataset, image_size=args.image_size, precision=args.precision,
                    batch_size=batch, global_batch_size=global_batch, seed=args.seed)
    report.start_run(len(train), step, last_step, epoch_steps, lr)
    while step < last_step:
        epoch = step // epoch_steps
        order = np.random.default_rng([args.seed, epoch]).permutation(len(train))
        losses, hits = [], []
        report.start_epoch()
        for start in range(0, epoch_steps * global_batch, global_batch):
            # Horovod would wait forever for a rank that hangs. Each call restarts the timer.
            faulthandler.dump_traceback_later(args.timeout, exit=True)
            indices = order[start:start + global_batch][rank::world_size]  # this rank's images
            loss, is_correct = train_step(x_train[indices], train.labels[indices])
            step += 1
            losses.append(loss)
            hits.append(is_correct)
            report.end_step(step)
            if step == last_step:  # --max-steps
                break
        means = hvd.allreduce(tf.constant([np.mean(losses), np.mean(hits)], tf.float64))
        report.end_epoch(epoch, *means.numpy().tolist())
        if args.checkpoint and step % epoch_steps == 0 and rank == 0:  # all have the same weights
            with open(f"{args.checkpoint}.tmp", "wb") as file:
                np.savez(file, **{weight.path: weight.numpy() for weight in model.weights})
            os.replace(f"{args.checkpoint}.tmp", args.checkpoint)  # never a half-written file

    # Evaluation: the ranks split the test images; each image counts once.
    for weight in model.non_trainable_weights:  # rank 0's BatchNorm statistics
        weight.assign(hvd.broadcast(weight.value, root_rank=0))
    logits = model.predict(x_test[rank::world_size], batch_size=batch, verbose=0)
    correct = np.sum(logits.argmax(1) == test.labels[rank::world_size])
    correct = hvd.allreduce(correct, op=hvd.Sum)
    report.end_run(int(correct), len(test))
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    run(main)
