"""How many threads the libraries below may use: one while matrices are small.

The pools of torch and of NumPy's BLAS wait for work by spinning. On small matrices, taken in turn, each spins on the
cores that the other needs, and two threads are slower than one.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from threadpoolctl import threadpool_limits

WIDE = 768
"""From this width on, matrices are large enough for threads to pay."""

_lock = Lock()
_inside = 0
_limits: Any = None
_torch_threads = 1


@contextmanager
def few_threads(width: int) -> Iterator[None]:
    """One thread for BLAS and torch where layers are narrower than ``WIDE``; afterwards as many as before.

    Several Python threads may be inside at once: the first limits the pools, and the last gives back what the first
    found. Torch keeps a number for each thread, so each sets and resets its own.
    """
    if width >= WIDE:
        yield
        return
    torch = sys.modules.get("torch")
    _enter(torch)
    try:
        yield
    finally:
        _leave(torch)


def _enter(torch: Any) -> None:
    global _inside, _limits, _torch_threads
    with _lock:
        if _inside == 0:
            _limits = threadpool_limits(1)
            _torch_threads = 1 if torch is None else torch.get_num_threads()
        _inside += 1
        if torch is not None:
            torch.set_num_threads(1)


def _leave(torch: Any) -> None:
    global _inside, _limits
    with _lock:
        _inside -= 1
        if torch is not None:
            torch.set_num_threads(_torch_threads)
        if _inside == 0:
            _limits.restore_original_limits()
            _limits = None
