"""Hooks that cannot harm: they observe, change nothing, and their own mistakes end in a note."""

import functools
from collections.abc import Callable

import torch

dropped = {}  # {name of a hook: the first exception that it caught}


def harmless(hook: Callable) -> Callable:
    """Return a hook whose exceptions end here: what it would have seen is dropped, and noted."""
    @functools.wraps(hook)
    def call(*args, **kwargs):
        if torch.compiler.is_compiling():  # of torch.compile, which would compile the hook, too
            return None
        try:
            return hook(*args, **kwargs)
        except Exception as problem:
            reason = f"{type(problem).__name__}: {problem}".splitlines()[0]
            dropped.setdefault(hook.__name__, reason)
            return None

    return call


def around(owner: object, name: str, before: Callable | None = None,
           after: Callable | None = None) -> None:
    """Let owner.name call before(*its arguments) first, and after(its result, *them) at its end.

    The result is None where the original raises.
    """
    original = getattr(owner, name)

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

    setattr(owner, name, call)
