"""Hooks that change nothing in the script, and record their own exceptions."""

import functools
import sys
from collections.abc import Callable

import torch

say = functools.partial(print, file=sys.__stderr__, flush=True)  # if the script redirects stderr
failed_hooks = {}  # {name of a hook: the first exception that it caught}


def never_raise(hook: Callable) -> Callable:
    """Return a hook whose exceptions are recorded in failed_hooks instead of raised."""
    @functools.wraps(hook)
    def call(*args, **kwargs):
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # they would compile the hook
            return None
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return None  # reading a tensor would end the capture of a CUDA graph
        try:
            return hook(*args, **kwargs)
        except Exception as problem:
            reason = f"{type(problem).__name__}: {problem}".splitlines()[0]
            failed_hooks.setdefault(hook.__name__, reason)
            return None

    return call


def wrap(original: Callable, before: Callable | None, after: Callable | None) -> Callable:
    """Return a function that calls before(*args), original(*args) and after(result, *args).

    The result is None if the original raised an exception.
    """
    @functools.wraps(original)
    def call(*args, **kwargs):
        if before:
            before(*args, **kwargs)
        result = None
        try:
            result = original(*args, **kwargs)
        finally:
            if after:
                after(result, *args, **kwargs)
        return result

    return call
