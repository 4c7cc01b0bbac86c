"""Train an image classifier on many devices with Horovod and TensorFlow.

    mpiexec -n 2 python main.py                     # or srun --mpi=pmi2, or horovodrun; python alone is one rank
    mpiexec -n 4 python main.py --dataset svhn --model resnet50 --batch-size 512 --max-steps 40
"""

import argparse
import json
import math
import os
import resource
import socket
import statistics
import sys
import time
from importlib.util import find_spec

import numpy as np
from tqdm import tqdm

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # errors, not what TensorFlow was compiled for
stderr = os.dup(2)
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # and not two lines about oneDNN, which no variable silences
try:
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf
    from keras import layers
finally:
    os.dup2(stderr, 2)

LAUNCHERS = {  # the variables in which launchers tell a process its rank, and how many ranks there are
    "HOROVOD_RANK": "HOROVOD_SIZE", "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_RANK": "MV2_COMM_WORLD_SIZE", "PMI_RANK": "PMI_SIZE", "RANK": "WORLD_SIZE",
    "SLURM_PROCID": "SLURM_STEP_NUM_TASKS"}


def launched_rank():
    """The rank that a launcher gave; RANK alone, without the mark of torchrun or deepspeed, is left from elsewhere."""
    marked = {"TORCHELASTIC_RUN_ID", "CROSS_RANK"} & os.environ.keys()
    return next((int(os.environ[name]) for name in LAUNCHERS if name in os.environ and (name != "RANK" or marked)), 0)


def opens(path):
    """Whether a file of this name opens for writing, which its folder's rights do not tell; nothing is left behind."""
    mode = "a" if os.path.lexists(path) else "x"
    try:
        open(path, mode).close()
    except FileExistsError:  # meanwhile: another run tries, too
        return True
    except OSError:
        return False
    if mode == "x":
        os.remove(path)
    return True


def parse_args():
    def whole(text):
        if not text.isdecimal() or int(text) == 0:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
        return int(text)

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.error, add = sys.exit, parser.add_argument
    add("--dataset", choices=("digits", "mnist", "svhn", "synthetic"), default="digits")
    add("--data-dir", default="data", help="where MNIST and SVHN are, or are downloaded to (data)")
    add("--model", choices=("cnn", "resnet18", "resnet50"), default="cnn")
    batch = parser.add_mutually_exclusive_group()
    batch.add_argument("--batch-size", type=whole, help="images a step on each rank (64)")
    batch.add_argument("--global-batch-size", type=whole, help="images a step on all ranks together")
    add("--epochs", type=whole, default=5)
    add("--max-steps", type=whole, default=math.inf, help="stop after this many steps")
    add("--lr", type=float, default=0.2, help="learning rate per 256 images of global batch (0.2)")
    add("--warmup-epochs", type=float, default=0, help="raise the learning rate linearly over these (0)")
    add("--seed", type=int, default=0)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--precision", choices=("fp32", "bf16", "fp64"), default="fp32")
    add("--image-size", type=whole, default=32, help="pixels a side, for synthetic images (32)")
    add("--checkpoint", metavar="FILE", help="saved after each epoch")
    add("--resume", action="store_true", help="go on from --checkpoint")
    add("--results", metavar="FILE", help="append one JSON line with what was measured")
    return parser.parse_args()


def start_horovod():
    """hvd.init(), unless Horovod does not see the launcher's ranks: each would train alone."""
    launched = next((size for size in LAUNCHERS.values() if size in os.environ), "SLURM_NTASKS")
    if "OMPI" in launched:
        import mpi4py
        mpi4py.rc.initialize = False  # only to look at it
        from mpi4py import MPI
        if "MPICH" in MPI.Get_library_version():  # it would abort
            sys.exit("the mpiexec that started these ranks is Open MPI's, Horovod's MPI is MPICH: take its mpiexec")
    hvd.init()
    if int(os.environ.get(launched, hvd.size())) != hvd.size():
        sys.exit(f"{launched}={os.environ[launched]}, but Horovod sees {hvd.size()}: start with mpiexec, "
                 f"srun --mpi=pmi2 or horovodrun --gloo; for one on purpose srun -n 1, or unset {launched}")


def load_data(args):
    """Training images and labels, test images and labels; images are bytes (n, side, side, channels)."""
    if args.dataset == "synthetic":  # one image, repeated without taking memory, however large the batch
        n, side = 50 * args.global_batch_size, args.image_size
        image = np.random.default_rng(args.seed).integers(256, size=(1, side, side, 3), dtype=np.uint8)
        return image, np.arange(n) % 10, image, np.arange(100) % 10
    if args.dataset == "digits":
        folder, = find_spec("sklearn").submodule_search_locations  # its file alone: importing it takes a second
        digits = np.loadtxt(f"{folder}/datasets/data/digits.csv.gz", np.uint8, delimiter=",")
        images, labels = digits[:, :-1].reshape(-1, 8, 8, 1), digits[:, -1].astype(np.int64)
        test = np.arange(len(images)) % 5 == 0
        return images[~test], labels[~test], images[test], labels[test]
    from torchvision.datasets import MNIST, SVHN  # the same files as PyTorch's chapters read
    socket.setdefaulttimeout(30)  # a node without a network may answer with silence
    try:
        if args.dataset == "mnist":
            train, test = MNIST(args.data_dir, train=True, download=True), MNIST(args.data_dir, train=False)
            return [array.numpy() for array in (train.data.unsqueeze(3), train.targets, test.data.unsqueeze(3),
                                                test.targets)]
        train, test = (SVHN(args.data_dir, split, download=True) for split in ("train", "test"))
        return train.data.transpose(0, 2, 3, 1), train.labels, test.data.transpose(0, 2, 3, 1), test.labels
    except Exception as problem:
        reason = " ".join(str(problem).split())[:80]
        sys.exit(f"no whole {args.dataset} in --data-dir {args.data_dir}, and no download ({reason}): run this once "
                 "where there is a network, or take --dataset digits, which needs none")


def prepare(args):
    """Device, training set and test set, or a line that tells the user what to mend; sets both batch sizes in args."""
    gpus, installed = tf.config.get_visible_devices("GPU"), len(tf.config.list_physical_devices("GPU"))
    args.global_batch_size = args.global_batch_size or hvd.size() * (args.batch_size or 64)
    args.batch_size, rest = divmod(args.global_batch_size, hvd.size())
    for path in filter(None, (args.checkpoint, args.results)):
        if hvd.rank() == 0 and not opens(path):  # it writes for all
            sys.exit(f"cannot write {path}: name a file in a folder that exists and that you may write to")
    for wrong, message in (
            (args.device == "cuda" and not gpus, "--device cuda: TensorFlow sees no GPU here; take --device cpu"),
            (rest, f"--global-batch-size: not a multiple of the {hvd.size()} ranks"),
            (gpus and not (hvd.cuda_built() or hvd.rocm_built()), "Horovod was built without GPUs: see its README"),
            (gpus and 1 < installed < hvd.local_size(), f"{hvd.local_size()} ranks, {installed} GPUs: start one a GPU"),
            (args.image_size < 6, "--image-size: the networks need 6 pixels a side or more"),
            (not args.lr > 0 or not args.warmup_epochs >= 0, "--lr has to be above 0, and --warmup-epochs not below"),
            (args.resume and not args.checkpoint, "--resume: name the file to go on from, with --checkpoint"),
            (args.checkpoint and args.resume != os.path.exists(args.checkpoint), f"{args.checkpoint} "
             + ("does not exist: leave out --resume" if args.resume else "exists: go on with --resume, or remove it"))):
        if wrong:
            sys.exit(message)
    if args.precision == "bf16":
        try:
            tf.nn.conv2d(tf.ones((1, 8, 8, 1), tf.bfloat16), tf.ones((3, 3, 1, 32), tf.bfloat16), 1, "VALID")
        except tf.errors.OpError:
            sys.exit("--precision bf16: oneDNN, which TensorFlow uses, has it for CPUs with AVX-512 alone; take fp32, "
                     "or TensorFlow's own slower convolutions: TF_ENABLE_ONEDNN_OPTS=0")
    data = load_data(args)
    if args.global_batch_size > len(data[1]):
        sys.exit(f"{args.dataset} has {len(data[1])} training images, not the {args.global_batch_size} of a step: "
                 f"at most --batch-size {len(data[1]) // hvd.size()} fits, or take --dataset synthetic")
    train, test = (tf.constant(data[0]), data[1]), (tf.constant(data[2]), data[3])
    return "cuda" if gpus else "cpu", train, test


def build_model(name, images):
    inputs = x = keras.Input(images.shape[1:])
    if name == "cnn":  # no BatchNorm, no dropout: the gradient of a batch is the mean of its parts' gradients
        x = layers.Conv2D(32, 3, activation="relu")(x)
        x = layers.MaxPooling2D(2)(layers.Conv2D(64, 3, activation="relu")(x))
        x = layers.Dense(128, activation="relu")(layers.Flatten()(x))
        return keras.Model(inputs, layers.Dense(10)(x))

    def conv(x, filters, size, stride=1, relu=True):
        x = layers.Conv2D(filters, size, stride, "same", use_bias=False, kernel_initializer="he_normal")(x)
        x = layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(x)
        return layers.ReLU()(x) if relu else x

    bottleneck, blocks = {"resnet18": (False, (2, 2, 2, 2)), "resnet50": (True, (3, 4, 6, 3))}[name]
    x = layers.Concatenate()([x] * 3) if x.shape[-1] == 1 else x  # three channels, as torchvision's
    x = layers.MaxPooling2D(3, 2, "same")(conv(x, 64, 7, 2))
    for stage, count in enumerate(blocks):
        for block in range(count):
            width, stride = 64 * 2**stage, 2 if stage and not block else 1
            if bottleneck:
                y = conv(conv(conv(x, width, 1), width, 3, stride), 4 * width, 1, relu=False)
            else:
                y = conv(conv(x, width, 3, stride), width, 3, relu=False)
            shortcut = x if x.shape == y.shape else conv(x, y.shape[-1], 1, stride, relu=False)
            x = layers.ReLU()(layers.Add()([y, shortcut]))
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def main():
    started = time.perf_counter()
    sys.stdout.reconfigure(line_buffering=True)  # a line appears when it is printed, through a pipe too
    start_horovod()
    rank, ranks = hvd.rank(), hvd.size()
    args = parse_args()
    gpus = tf.config.list_physical_devices("GPU") if args.device != "cpu" else []
    gpus = gpus[hvd.local_rank():][:1] if len(gpus) > 1 else gpus  # a rank that sees a single GPU takes that one
    tf.config.set_visible_devices(gpus, "GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)  # take what is needed, not all that there is
    sys.stdout = sys.stdout if rank == 0 else open(os.devnull, "w")  # rank 0 speaks for all
    tf.config.threading.set_intra_op_parallelism_threads(int(os.environ.get("OMP_NUM_THREADS", ranks > 1)))  # 0: all
    keras.utils.set_random_seed(args.seed)
    keras.config.set_floatx("float64" if args.precision == "fp64" else "float32")
    keras.config.set_dtype_policy("mixed_bfloat16" if args.precision == "bf16" else keras.config.floatx())
    for turn in (True, False):  # rank 0, which may have to download, then the others: the mistake of one ends all
        mistake = None
        try:
            if (rank == 0) == turn:
                device, train, test = prepare(args)
        except SystemExit as end:
            mistake = end.code
        seen = hvd.allgather_object(mistake, name="mistakes")  # unnamed, None and text would wait for each other
        if any(seen):
            sys.exit(next(filter(None, seen)))
    nodes = hvd.cross_size()
    dtype = tf.as_dtype(keras.config.floatx())
    std, mean = (function(tf.cast(train[0][:256], dtype)) for function in (tf.math.reduce_std, tf.reduce_mean))

    def batches(dataset, indices):
        """A batch is one slice of bytes, which become standardised numbers on the device."""
        images, labels = dataset
        for first in range(0, len(indices), args.batch_size):
            batch = indices[first:first + args.batch_size]
            yield standardised(images, batch % len(images)), labels[batch]

    @tf.function(reduce_retracing=True)
    def standardised(images, batch):
        return (tf.cast(tf.gather(images, batch), dtype) - mean) / std

    model = build_model(args.model, train[0])
    step, lr = 0, args.lr * args.global_batch_size / 256
    optimizer = keras.optimizers.SGD(lr, momentum=0.9)
    optimizer.build(model.trainable_variables)
    training = {name: vars(args)[name] for name in ("dataset", "image_size", "model", "global_batch_size", "seed")}
    state = {variable.path: variable for variable in model.variables + optimizer.variables}
    if args.resume:
        try:
            with np.load(args.checkpoint) as checkpoint:
                if json.loads(str(checkpoint["training"])) != training:
                    raise ValueError(f"its training had {checkpoint['training']}")
                for name, variable in state.items():
                    variable.assign(checkpoint[name])
                step = int(checkpoint["step"])
        except Exception as problem:
            sys.exit(f"cannot go on from {args.checkpoint}, no whole checkpoint of this training: "
                     f"{' '.join(str(problem).split()):.150}")
    hvd.broadcast_variables([variable.value for variable in state.values()], root_rank=0)  # everyone gets rank 0's
    n = len(train[1])
    epoch_steps = n // args.global_batch_size
    last_step = min(args.epochs * epoch_steps, args.max_steps)

    @tf.function
    def train_step(images, labels):
        with tf.GradientTape() as tape:
            logits = tf.cast(model(images, training=True), dtype)
            batch_loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        tape = hvd.DistributedGradientTape(tape)  # its gradient() averages over the ranks
        gradients = tape.gradient(batch_loss, [variable.value for variable in model.trainable_variables])
        optimizer.apply(gradients, model.trainable_variables)
        return batch_loss, tf.argmax(logits, 1) == labels

    @tf.function(reduce_retracing=True)
    def count_right(images, labels):
        return tf.math.count_nonzero(tf.argmax(model(images, training=False), 1) == labels)

    parameters = sum(math.prod(variable.shape) for variable in model.trainable_variables)
    print(f"{args.dataset}: {n:,} images, {args.model}: {parameters:,} parameters, {args.precision}, {device}")
    print(f"ranks: {ranks}, nodes: {nodes}, batch: {args.batch_size} a rank, {args.global_batch_size} global, "
          f"learning rate: {lr:g}, steps: {step} of {last_step} done, {epoch_steps} an epoch")
    step_seconds = []
    while step < last_step:
        epoch, first = divmod(step, epoch_steps)
        order = np.random.default_rng(args.seed + epoch).permutation(n)[rank::ranks]  # another order each epoch
        steps = range(first, min(epoch_steps, last_step - epoch * epoch_steps))
        indices = order[steps.start * args.batch_size:steps.stop * args.batch_size]
        losses, hits, times, epoch_started = [], [], [time.perf_counter()], time.perf_counter()
        for images, labels in tqdm(batches(train, indices), total=len(steps), leave=False, disable=rank > 0 or None):
            optimizer.learning_rate = lr * min(1, (step + 1) / max(1, args.warmup_epochs * epoch_steps))
            batch_loss, hit = train_step(images, labels)
            losses.append(batch_loss)
            hits.append(hit)
            step += 1
            losses[-2:][0].numpy()  # a GPU may be one step behind, no more: then these are the times of steps
            times.append(time.perf_counter())
        means = tf.stack([tf.reduce_mean(losses), tf.reduce_mean(tf.cast(hits, dtype))])
        loss, accuracy = hvd.allreduce(means).numpy().tolist()
        speed = len(steps) * args.global_batch_size / (time.perf_counter() - epoch_started)
        if not math.isfinite(loss):
            sys.exit(f"the loss became {loss} in epoch {epoch + 1}: lower --lr, or give it --warmup-epochs")
        print(f"epoch {epoch + 1}/{args.epochs}: loss {loss:.4f}, accuracy {accuracy:.4f}, {speed:,.0f} images/s")
        step_seconds += [b - a for a, b in zip(times, times[1:])]
        if args.checkpoint and rank == 0:
            with open(f"{args.checkpoint}.tmp", "wb") as file:
                np.savez(file, training=json.dumps(training), step=step,
                         **{name: variable.numpy() for name, variable in state.items()})
            os.replace(f"{args.checkpoint}.tmp", args.checkpoint)  # a killed run leaves no half file

    hvd.broadcast_variables([variable.value for variable in model.variables], root_rank=0)  # BatchNorm's differ by rank
    right = tf.constant(0, tf.int64)
    for images, labels in batches(test, np.arange(rank, len(test[1]), ranks)):
        right += count_right(images, labels)
    right = hvd.allreduce(right, op=hvd.Sum)
    print(f"test accuracy {right / len(test[1]):.4f} ({right} of {len(test[1])} images)")
    if args.results and step_seconds and rank == 0:
        step_time = statistics.median(step_seconds[5:] or step_seconds)  # the first 5 warm up
        record = {"chapter": "02_horovod/tensorflow", "ranks": ranks, "nodes": nodes, "device": device, **training,
                  "precision": args.precision, "batch_size": args.batch_size, "parameters": parameters,
                  "steps": len(step_seconds), "step_seconds": step_time,
                  "images_per_second": args.global_batch_size / step_time,
                  "gradient_bytes": parameters * dtype.size,
                  "peak_memory_bytes": tf.config.experimental.get_memory_info("GPU:0")["peak"] if device == "cuda" else
                  resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
                  "loss": loss, "accuracy": accuracy, "test_accuracy": int(right) / len(test[1]),
                  "total_seconds": time.perf_counter() - started}
        with open(args.results, "a") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    try:
        main()
    except SystemExit as end:  # with a line for the user who made a mistake, or without
        if launched_rank():
            time.sleep(2)  # rank 0 speaks for all, before the launcher ends them
        elif end.code:
            print(f"main.py: {end}", file=sys.stderr)
        sys.exit(2 if end.code else 0)
    except Exception as problem:
        if "Horovod has been shut down" in str(problem):  # another rank failed, and says why
            sys.exit(1)
        raise
