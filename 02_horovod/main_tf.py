"""Train an image classifier on many devices with Horovod and TensorFlow.

    mpiexec -n 2 python main_tf.py      # or srun --mpi=pmi2, or horovodrun --gloo; python: one rank
"""

import faulthandler
import json
import math
import os
import sys

import numpy as np

from workshop import data, devices, flags
from workshop.ranks import check_world_size, refuse, run
from workshop.report import Report

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # errors only
sys.modules["triton"] = None  # torchvision, used for MNIST, would import triton and crash
import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from keras import layers


def build_model(name: str, image_shape: tuple[int, ...]) -> keras.Model:
    channels, height, width = image_shape
    inputs = keras.Input((height, width, channels))
    if name != "cnn":
        from workshop.resnet import resnet
        return resnet(name, inputs, 10)
    x = layers.Conv2D(32, 3, activation="relu")(inputs)  # no BatchNorm or dropout: the result
    x = layers.Conv2D(64, 3, activation="relu")(x)       # is the same on any number of ranks
    x = layers.Flatten()(layers.MaxPooling2D(2)(x))
    x = layers.Dense(128, activation="relu")(x)
    return keras.Model(inputs, layers.Dense(10)(x))


def batches(dataset, order, size):
    """Yield batches of images and labels in the given order of indices."""
    for indices in np.split(order, range(size, len(order), size)):
        yield dataset[indices]


def main():
    # Ranks and device: the launcher has started one process of this program per rank.
    hvd.init()  # all ranks connect here, over MPI or gloo
    rank, world_size, local_rank = hvd.rank(), hvd.size(), hvd.local_rank()
    check_world_size(world_size)
    parser = flags.make_parser(__doc__, lr=0.2)
    parser.add_argument("--model", choices=("cnn", "resnet18", "resnet50"), default="cnn")
    args = parser.parse_args()
    gpus = tf.config.list_physical_devices("GPU") if args.device != "cpu" else []
    if not hvd.cuda_built() and not hvd.rocm_built():  # Horovod would abort on GPU tensors
        gpus = []
    gpus = [gpus[local_rank % len(gpus)]] if gpus else []  # %: index 0 if each rank sees one GPU
    tf.config.set_visible_devices(gpus, "GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)  # allocate as needed, not all at once
    threads = int(os.environ.get("OMP_NUM_THREADS", 1 if world_size > 1 else 0))  # 0: all cores
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)  # operations in parallel
    device = "cuda" if gpus else "cpu"
    # Exit if ranks share a GPU: gather() starts TensorFlow, which then cannot change to the CPU.
    gpu_names = devices.gather(devices.describe_visible_gpus() + gpus[0].name if gpus else None)
    if any(gpu_names) and len(set(gpu_names) - {None}) < world_size:
        refuse("two ranks share a GPU: start one rank per GPU, or use --device cpu")
    if not gpus:
        devices.refuse_cpu(args)
    keras.utils.set_random_seed(args.seed)
    keras.config.set_floatx("float64" if args.precision == "fp64" else "float32")
    policy = "mixed_bfloat16" if args.precision == "bf16" else keras.config.floatx()
    keras.config.set_dtype_policy(policy)
    dtype = tf.as_dtype(keras.config.floatx())

    # Batch and data: shuffled every epoch and split among the ranks; leftover images are dropped.
    global_batch = args.global_batch_size or world_size * args.batch_size
    batch = global_batch // world_size  # per rank; flags.check() refuses a remainder
    flags.check(args, device, global_batch, world_size)
    if rank > 0:
        devices.gather("loaded")  # wait for rank 0, which may download
    train, test = data.load_data(args, global_batch)
    if rank == 0:
        devices.gather("loaded")
    mean, std = float(train.images[:256].mean()), float(train.images[:256].std())  # 256 are enough

    @tf.function(reduce_retracing=True)
    def standardise(images):
        images = tf.transpose(tf.cast(images, dtype), (0, 2, 3, 1))  # channels last
        return (images - mean) / std

    # Model and optimizer.
    model = build_model(args.model, train.images.shape[1:])
    lr = args.lr * global_batch / 256  # linear scaling rule: twice the batch, twice the rate
    optimizer = keras.optimizers.SGD(lr, momentum=0.9)
    optimizer.build(model.trainable_variables)
    state = {variable.path: variable for variable in model.variables + optimizer.variables}

    @tf.function
    def train_step(images, labels):
        with tf.GradientTape() as tape:
            logits = tf.cast(model(images, training=True), dtype)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(losses)
        tape = hvd.DistributedGradientTape(tape)  # its gradient() averages over the ranks
        gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
        optimizer.apply(gradients, model.trainable_variables)
        return loss, tf.math.count_nonzero(tf.argmax(logits, 1) == labels)

    @tf.function(reduce_retracing=True)
    def count_correct(images, labels):
        return tf.math.count_nonzero(tf.argmax(model(images, training=False), 1) == labels)

    # Resume after the last saved epoch; then every rank gets rank 0's state.
    step = 0
    settings = {"dataset": args.dataset, "image_size": args.image_size, "model": args.model,
                "global_batch_size": global_batch, "precision": args.precision, "seed": args.seed}
    if flags.has_checkpoint(args):
        with flags.exit_on_load_error(args), np.load(args.checkpoint) as arrays:
            flags.refuse_other_settings(json.loads(str(arrays["settings"])), settings)
            for name, variable in state.items():
                variable.assign(arrays[name])
            step = int(arrays["step"])
    hvd.broadcast_variables([variable.value for variable in state.values()], root_rank=0)

    # Training: each rank has its own batch; averaged gradients keep all parameters identical.
    epoch_steps = len(train) // global_batch
    last_step = min(args.epochs * epoch_steps, args.max_steps)
    warmup_steps = max(1, args.warmup_epochs * epoch_steps)
    parameters = sum(math.prod(variable.shape) for variable in model.trainable_variables)
    report = Report(args, rank, chapter="02_horovod/main_tf.py", ranks=world_size, **settings,
                    nodes=hvd.cross_size(), device=device, batch_size=batch,
                    parameters=parameters)
    report.start_run(len(train), step, last_step, epoch_steps, lr)
    while step < last_step:
        epoch = step // epoch_steps
        order = np.random.default_rng(args.seed + epoch).permutation(len(train))
        order = order[rank::world_size]  # this rank takes every N-th image
        losses, hits = [], []
        report.start_epoch()
        for images, labels in batches(train, order[:epoch_steps * batch], batch):
            # Horovod would wait forever for a rank that hangs. Each call restarts the timer.
            faulthandler.dump_traceback_later(args.timeout, exit=True)
            optimizer.learning_rate = lr * min(1, (step + 1) / warmup_steps)
            loss, correct = train_step(standardise(images), labels)
            step += 1
            losses.append(loss)
            hits.append(correct)
            if len(losses) > 1:
                losses[-2].numpy()  # wait for the previous step: measure steps, not launches
            report.end_step(step)
            if step == last_step:  # --max-steps
                break
        means = tf.stack([tf.reduce_mean(losses), tf.reduce_mean(tf.cast(hits, dtype)) / batch])
        means = hvd.allreduce(means)
        report.end_epoch(epoch, *means.numpy().tolist())
        epoch_done = step % epoch_steps == 0
        if args.checkpoint and epoch_done and rank == 0:  # the others have the same parameters
            arrays = {name: variable.numpy() for name, variable in state.items()}
            with open(f"{args.checkpoint}.tmp", "wb") as file:
                np.savez(file, settings=json.dumps(settings), step=step, **arrays)
            os.replace(f"{args.checkpoint}.tmp", args.checkpoint)  # never a half-written file

    # Evaluation: the ranks split the test images, and use rank 0's BatchNorm statistics.
    hvd.broadcast_variables([variable.value for variable in model.variables], root_rank=0)
    correct = 0
    for images, labels in batches(test, np.arange(rank, len(test), world_size), batch):
        correct += count_correct(standardise(images), labels)
    correct = hvd.allreduce(correct, op=hvd.Sum)
    report.end_run(int(correct), len(test))
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    run(main)  # calls main(); if one rank fails, all end: README.md, "If a rank fails"
