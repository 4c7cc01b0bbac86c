"""Train an image classifier on many devices with Horovod and TensorFlow.

    mpiexec -n 2 python main.py         # or srun --mpi=pmi2, or horovodrun --gloo; python: one rank

ranks.py is for your own programs, too; workshop.py has this course's flags, data and report.
"""

import json
import math
import os
import workshop  # first: it refuses a wrong batch at once, and PyTorch takes seconds

import numpy as np

from ranks import alarm, rank_0_first, refuse_lone_ranks, run

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # errors, not what TensorFlow was compiled for
with workshop.quiet():
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf
    from keras import layers


def build_model(name: str, images: tf.Tensor) -> keras.Model:
    inputs = keras.Input(images.shape[1:])
    if name != "cnn":
        from resnet import resnet
        return resnet(name, inputs, workshop.CLASSES)
    x = layers.Conv2D(32, 3, activation="relu")(inputs)  # no BatchNorm, no dropout: any
    x = layers.Conv2D(64, 3, activation="relu")(x)       # number of ranks trains the same
    x = layers.Flatten()(layers.MaxPooling2D(2)(x))
    x = layers.Dense(128, activation="relu")(x)
    return keras.Model(inputs, layers.Dense(10)(x))


def main():
    # Ranks and device: the launcher has started this program once per rank, each a process.
    args = workshop.parse_args(__doc__)
    hvd.init()  # all ranks meet, by MPI or gloo
    rank, world_size, local_rank = hvd.rank(), hvd.size(), hvd.local_rank()
    refuse_lone_ranks(world_size)
    gpus = tf.config.list_physical_devices("GPU") if args.device != "cpu" else []
    if not hvd.cuda_built() and not hvd.rocm_built():  # Horovod would abort on a GPU's tensors
        gpus = []
    gpus = gpus[local_rank % max(1, len(gpus)):][:1]  # a rank may see its own only
    tf.config.set_visible_devices(gpus, "GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)  # take what is needed, not all there is
    threads = int(os.environ.get("OMP_NUM_THREADS", world_size > 1))  # 0: all cores
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)  # operations side by side
    device = "cuda" if gpus else "cpu"
    workshop.refuse_shared_gpus(args, gpus)
    keras.utils.set_random_seed(args.seed)
    keras.config.set_floatx("float64" if args.precision == "fp64" else "float32")
    policy = "mixed_bfloat16" if args.precision == "bf16" else keras.config.floatx()
    keras.config.set_dtype_policy(policy)
    dtype = tf.as_dtype(keras.config.floatx())

    # Batch and data: each epoch is shuffled and dealt out to the ranks; leftover images stay out.
    args.global_batch_size = args.global_batch_size or world_size * (args.batch_size or 64)
    args.batch_size = args.global_batch_size // world_size  # per rank; check() refuses a remainder
    with rank_0_first(rank):  # rank 0, which may download, then all others
        workshop.check(args, device, world_size)
        train, test = workshop.load_data(args)
    images, labels = tf.constant(train[0].transpose(0, 2, 3, 1)), train[1]  # channels come last
    test_images, test_labels = tf.constant(test[0].transpose(0, 2, 3, 1)), test[1]
    some = tf.cast(images[:256], dtype)
    std, mean = tf.math.reduce_std(some), tf.reduce_mean(some)

    @tf.function(reduce_retracing=True)
    def standardised(images, batch):
        batch %= tf.shape(images, tf.int64)[0]  # synthetic images are fewer than their labels
        return (tf.cast(tf.gather(images, batch), dtype) - mean) / std

    # The model and its optimizer.
    model = build_model(args.model, images)
    lr = args.lr * args.global_batch_size / 256  # the linear rule: twice the batch, twice the rate
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
    def count_right(images, labels):
        return tf.math.count_nonzero(tf.argmax(model(images, training=False), 1) == labels)

    # Resume: continue after the epoch that was saved. Then all ranks get what rank 0 has.
    step = 0
    if args.resume:
        with workshop.resuming(args, world_size), np.load(args.checkpoint) as arrays:
            workshop.refuse_other(json.loads(str(arrays["training"])), args)
            for name, variable in state.items():
                variable.assign(arrays[name])
            step = int(arrays["step"])
    hvd.broadcast_variables([variable.value for variable in state.values()], root_rank=0)

    # Training: each rank has its own batch; averaged gradients make equal steps and parameters.
    n, size = len(labels), args.batch_size
    epoch_steps = n // args.global_batch_size
    last_step = min(args.epochs * epoch_steps, args.max_steps)
    warmup_steps = max(1, args.warmup_epochs * epoch_steps)
    parameters = sum(math.prod(variable.shape) for variable in model.trainable_variables)
    report = workshop.Report("02_horovod/tensorflow", args, device, parameters, n,
                             rank, world_size, hvd.cross_size())
    report.begin(step, last_step, epoch_steps, lr)
    while step < last_step:
        epoch = step // epoch_steps
        order = np.random.default_rng(args.seed + epoch).permutation(n)  # another order each epoch
        order = order[rank::world_size]  # every N-th is this rank's
        losses, hits = [], []
        for place in report.steps(range(0, epoch_steps * size, size)):
            alarm(args.timeout)  # Horovod would wait for ever for a rank that has stopped
            optimizer.learning_rate = lr * min(1, (step + 1) / warmup_steps)
            batch = order[place:place + size]
            loss, right = train_step(standardised(images, batch), labels[batch])
            step += 1
            losses.append(loss)
            hits.append(right)
            losses[-2:][0].numpy()  # a GPU may be one step behind: so these are times of steps
        means = tf.stack([tf.reduce_mean(losses), tf.reduce_mean(tf.cast(hits, dtype)) / size])
        means = hvd.allreduce(means)
        report.epoch(epoch, *means.numpy().tolist())
        epoch_done = step % epoch_steps == 0
        if args.checkpoint and epoch_done and rank == 0:  # the others have the same parameters
            arrays = {name: variable.numpy() for name, variable in state.items()}
            with open(f"{args.checkpoint}.tmp", "wb") as file:
                np.savez(file, training=json.dumps(workshop.training_of(args)), step=step, **arrays)
            os.replace(f"{args.checkpoint}.tmp", args.checkpoint)  # never a half-written file
    alarm(0)

    # Evaluation: every test image once, on one of the ranks. BatchNorm's statistics are rank 0's.
    hvd.broadcast_variables([variable.value for variable in model.variables], root_rank=0)
    right, own = 0, np.arange(rank, len(test_labels), world_size)
    for batch in np.split(own, range(size, len(own), size)):
        right += count_right(standardised(test_images, batch), test_labels[batch])
    right = hvd.allreduce(right, op=hvd.Sum)
    report.end(int(right), len(test_labels))


if __name__ == "__main__":
    run(main)  # calls main(); what fails on one rank ends all: README, "If a rank fails"
