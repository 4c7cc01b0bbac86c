"""What the frames of a running program tell: who calls a collective, where a rank is, whether an epoch comes again."""

import ast
import contextlib
import linecache
import os
from types import FrameType

CALLERS = {"/ddp_comm_hooks/": "DDP's hook", "/deepspeed/": "DeepSpeed", "/torch/distributed/fsdp": "FSDP",
           "/torch/nn/parallel/distributed": "DDP",
           "/torch/nn/modules/_functions": "SyncBatchNorm", "/torch/distributed/optim": "ZeroRedundancyOptimizer",
           "/horovod/torch/optimizer": "Horovod's optimizer", "/horovod/torch/functions": "Horovod's functions",
           "/accelerate/": "Accelerate", "/lightning/": "Lightning"}
COMMUNICATES = ("/torch/distributed/", "/torch/nn/parallel/distributed", "/torch/autograd/graph", "/horovod/",
                "/deepspeed/comm", "/mpi4py/")
COMPILES = ("/subprocess.py", "/torch/utils/cpp_extension", "/torch/utils/file_baton", "/torch/_inductor",
            "/torch/_dynamo")
SET_EPOCH = "/accelerate/", "/lightning/"  # libraries that call it, though perhaps later than their loader begins
LIBRARIES = "site-packages", "dist-packages"
HERE = os.path.splitext(__file__)[0].removesuffix("_frames")  # agree.py, and the files that belong to it


def stack(frame):
    """(file, line, function) of a frame and its callers."""
    while frame:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def caller_of(frame: FrameType) -> str:
    """A library that is known, or "file:line" of whoever else has called."""
    for path, line, _ in stack(frame):
        known = next((name for part, name in CALLERS.items() if part in path), None)
        if known:
            return known
        if "/torch/" not in path and not path.startswith(HERE):
            return f"{os.path.basename(path)}:{line}"
    return "torch"


def places(frame: FrameType, script: str) -> list[str]:
    """Where a program is, the innermost place first, as "file:line, in function" of files that are no library's."""
    frames = list(stack(frame))
    files = [path for path, _, _ in frames]
    own = frames[:files.index(script) + 1] if script in files else frames
    return [f"{os.path.basename(path)}:{line}, in {name}" for path, line, name in own
            if not any(part in path for part in (*LIBRARIES, HERE))] or ["its start"]


def waits(frame: FrameType, anywhere: bool) -> bool:
    """Whether it is in communication, in backward, at whose end DDP waits, or anywhere; and does not compile there."""
    files = [path for path, _, _ in stack(frame)]
    communicates = anywhere or any(part in path for path in files for part in COMMUNICATES)
    return communicates and not any(part in path for path in files for part in COMPILES)


def epoch_comes_again(frame: FrameType) -> bool:
    """Whether a loop around the place that iterates over a DataLoader runs more than once, and nobody calls set_epoch.

    As far as the callers' sources tell: a `while`, or a `for` over a range(...) of more than one number.
    """
    again = False
    while frame:
        path = frame.f_code.co_filename
        if any(part in path for part in SET_EPOCH):
            return False
        if not any(part in path for part in (*LIBRARIES, HERE)):
            tree = tree_of(path)
            if any(isinstance(node, ast.Attribute) and node.attr == "set_epoch" for node in ast.walk(tree)):
                return False
            loops = [loop for loop in loops_around(tree, frame.f_lineno) if runs_again(loop, frame)]
            if any(makes_a_sampler(loop) for loop in loops):
                return False
            again = again or bool(loops)
        frame = frame.f_back
    return again


def tree_of(path):
    """The syntax tree of a file, empty where it has none."""
    with contextlib.suppress(SyntaxError):
        return ast.parse("".join(linecache.getlines(path)))
    return ast.Module([], [])


def makes_a_sampler(loop):
    """Whether another sampler is made in each round."""
    calls = [ast.unparse(node.func) for node in ast.walk(loop) if isinstance(node, ast.Call)]
    return any(call.endswith("Sampler") for call in calls)


def loops_around(tree, line):
    """The loops of a program in whose body a line stands, as nodes of its syntax tree."""
    return [node for node in ast.walk(tree) if isinstance(node, (ast.For, ast.While))
            and node.body[0].lineno <= line <= node.body[-1].end_lineno]


def runs_again(loop, frame):
    """Whether a loop is a `while`, or goes over a range(...) that is not known to have one number only."""
    if isinstance(loop, ast.While):
        return True
    ranges = [node for node in ast.walk(loop.iter) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
              and node.func.id in ("range", "trange")]
    if not ranges:
        return False
    numbers = [number_of(argument, frame) for argument in ranges[0].args]
    return not all(isinstance(number, int) for number in numbers) or len(range(*numbers)) > 1


def number_of(node, frame):
    """What a constant, a name, an attribute, or a sum of these is in a frame; None if that is unknown."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        return getattr(number_of(node.value, frame), node.attr, None)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = number_of(node.left, frame), number_of(node.right, frame)
        return sum(parts) if all(isinstance(part, int) for part in parts) else None
    return None
