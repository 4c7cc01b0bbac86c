"""Print where the time of a training step goes, with PyTorch and with TensorFlow, by the profiler of each.

    python tools/measuring/operators.py

It is the step of chapter 1's cnn on images of 32 x 32 pixels, on one thread of a CPU.
"""

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "01_single_node"))
STEPS, BATCH, PIXELS = 10, 64, 32
KINDS = {  # what the names of their operators hold
    "convolutions": ("conv", "Conv2D"), "max-pooling": ("max_pool", "MaxPool"),
    "ReLU": ("relu", "clamp_min", "threshold", "Relu"), "linear layers": ("addmm", "aten::mm", "MatMul")}


def milliseconds(step):
    """The median of some steps, without a profiler."""
    times = []
    for _ in range(2 * STEPS):
        started = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


def by_kind(total, operators):
    """{kind: milliseconds of a step} from {operator: its milliseconds without what it calls}."""
    found = dict.fromkeys(KINDS, 0.0)
    for name, spent in operators.items():
        kind = next((kind for kind, words in KINDS.items() if any(word in name for word in words)), None)
        if kind:
            found[kind] += spent / STEPS
    return found | {"the rest": max(0.0, total - sum(found.values())), "a step": total}


def pytorch():
    import torch
    from main import build_model

    torch.set_num_threads(1)
    images, labels = torch.randn(BATCH, 3, PIXELS, PIXELS), torch.randint(10, (BATCH,))
    model = build_model("cnn", images)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step():
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    total = milliseconds(step)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(STEPS):
            step()
    return by_kind(total, {event.key: event.self_cpu_time_total / 1e3 for event in profile.key_averages()})


def tensorflow():
    os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
    from main_tf import build_model, keras, tf
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    images, labels = tf.random.normal((BATCH, PIXELS, PIXELS, 3)), tf.random.uniform((BATCH,), 0, 10, tf.int64)
    model = build_model("cnn", images)
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    optimizer.build(model.trainable_variables)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(images, training=True))
            loss = tf.reduce_mean(losses)
        optimizer.apply(tape.gradient(loss, [variable.value for variable in model.trainable_variables]),
                        model.trainable_variables)
        return loss

    total = milliseconds(lambda: step().numpy())
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder)
        for _ in range(STEPS):
            step().numpy()
        tf.profiler.experimental.stop()
        file, = Path(folder).rglob("*.xplane.pb")
        space = xplane_pb2.XSpace.FromString(file.read_bytes())
    operators = {}
    for plane in space.planes:
        for event in (event for line in plane.lines for event in line.events):
            name = plane.event_metadata[event.metadata_id].name.split(":")[-1]
            operators[name] = operators.get(name, 0) + event.duration_ps / 1e9
    return by_kind(total, operators)


def main():
    columns = {"PyTorch": pytorch(), "TensorFlow": tensorflow()}
    print(f"cnn, {PIXELS} x {PIXELS} pixels, batch {BATCH}, one thread: milliseconds of a step")
    print(f"{'':13}", *(f"{name:>10}" for name in columns))
    for kind in columns["PyTorch"]:
        print(f"{kind:13}", *(f"{column[kind]:10.1f}" for column in columns.values()))


if __name__ == "__main__":
    main()
