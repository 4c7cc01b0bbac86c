"""Train an image classifier on one device with TensorFlow: main.py's twin.

    python main_tf.py                   # five epochs of handwritten digits, a few seconds

ranks.py is for your own programs, too; workshop.py has this course's flags, data and report.
"""

import json
import math
import os
import workshop  # first: it refuses a wrong batch at once, and PyTorch takes seconds

import numpy as np

from ranks import refuse_lone_ranks, run

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # errors, not what TensorFlow was compiled for
with workshop.quiet():
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
    # The device: one process, one GPU or CPU.
    args = workshop.parse_args(__doc__)
    refuse_lone_ranks(1, one_process=True)  # several would each train the same
    gpus = tf.config.list_physical_devices("GPU")[:1] if args.device != "cpu" else []
    if not gpus:
        workshop.take_cpu(args)
    tf.config.set_visible_devices(gpus, "GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)  # take what is needed, not all there is
    threads = int(os.environ.get("OMP_NUM_THREADS", 0))  # 0: all cores
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)  # operations side by side
    device = "cuda" if gpus else "cpu"
    keras.utils.set_random_seed(args.seed)
    keras.config.set_floatx("float64" if args.precision == "fp64" else "float32")
    policy = "mixed_bfloat16" if args.precision == "bf16" else keras.config.floatx()
    keras.config.set_dtype_policy(policy)
    dtype = tf.as_dtype(keras.config.floatx())

    # Batch and data: every epoch is shuffled anew; a remainder that fills no batch stays out.
    args.global_batch_size = args.batch_size = args.global_batch_size or args.batch_size or 64
    workshop.check(args, device)
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
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss, tf.math.count_nonzero(tf.argmax(logits, 1) == labels)

    @tf.function(reduce_retracing=True)
    def count_right(images, labels):
        return tf.math.count_nonzero(tf.argmax(model(images, training=False), 1) == labels)

    # Resume: continue after the epoch that was saved.
    step = 0
    if args.resume:
        with workshop.resuming(args), np.load(args.checkpoint) as arrays:
            workshop.refuse_other(json.loads(str(arrays["training"])), args)
            for name, variable in state.items():
                variable.assign(arrays[name])
            step = int(arrays["step"])

    # Training.
    n, size = len(labels), args.batch_size
    epoch_steps = n // args.global_batch_size
    last_step = min(args.epochs * epoch_steps, args.max_steps)
    warmup_steps = max(1, args.warmup_epochs * epoch_steps)
    parameters = sum(math.prod(variable.shape) for variable in model.trainable_variables)
    report = workshop.Report("01_single_node/main_tf.py", args, device, parameters, n)
    report.begin(step, last_step, epoch_steps, lr)
    while step < last_step:
        epoch = step // epoch_steps
        order = np.random.default_rng(args.seed + epoch).permutation(n)  # another order each epoch
        losses, hits = [], []
        for place in report.steps(range(0, epoch_steps * size, size)):
            optimizer.learning_rate = lr * min(1, (step + 1) / warmup_steps)
            batch = order[place:place + size]
            loss, right = train_step(standardised(images, batch), labels[batch])
            step += 1
            losses.append(loss)
            hits.append(right)
            losses[-2:][0].numpy()  # a GPU may be one step behind: so these are times of steps
        means = tf.stack([tf.reduce_mean(losses), tf.reduce_mean(tf.cast(hits, dtype)) / size])
        report.epoch(epoch, *means.numpy().tolist())
        epoch_done = step % epoch_steps == 0
        if args.checkpoint and epoch_done:
            arrays = {name: variable.numpy() for name, variable in state.items()}
            with open(f"{args.checkpoint}.tmp", "wb") as file:
                np.savez(file, training=json.dumps(workshop.training_of(args)), step=step, **arrays)
            os.replace(f"{args.checkpoint}.tmp", args.checkpoint)  # never a half-written file

    # Evaluation: every test image once.
    right, own = 0, np.arange(len(test_labels))
    for batch in np.split(own, range(size, len(own), size)):
        right += count_right(standardised(test_images, batch), test_labels[batch])
    report.end(int(right), len(test_labels))


if __name__ == "__main__":
    run(main)
