"""One thread for BLAS and torch while matrices are small."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from threading import Lock, local
from typing import Any

from threadpoolctl import ThreadpoolController

WIDE = 768
"""Layers of this width on are large enough for threads to pay."""


class _Pools:
    """What is known of the thread pools while they are limited; guarded by the lock."""

    lock = Lock()
    inside = 0  # Python threads
    before: tuple[tuple[Any, int], ...] = ()  # BLAS libraries, and how many threads they had
    torch_threads = 1
    here = local()  # whether this very Python thread is inside


@contextmanager
def few_threads(width: int) -> Iterator[None]:
    """One thread for BLAS and torch where layers are narrower than ``WIDE``; afterwards as many as before.

    The pools of torch and of NumPy's BLAS wait for work by spinning. On small matrices, taken in turn, each spins on
    the cores that the other needs, and two threads are slower than one.

    Several Python threads may be inside at once: the first limits the pools, and the last gives back what the first
    found. Torch keeps a number for each thread, so each sets and resets its own.
    """
    if width >= WIDE or getattr(_Pools.here, "inside", False):
        yield
        return
    torch = sys.modules.get("torch")
    with _Pools.lock:
        if _Pools.inside == 0:
            libraries = _blas_libraries(len(sys.modules))
            _Pools.before = tuple((library, library.num_threads) for library in libraries)
            _Pools.torch_threads = 1 if torch is None else torch.get_num_threads()
            for library in libraries:
                _set_threads(library, 1)
        _Pools.inside += 1
    if torch is not None:
        torch.set_num_threads(1)
    _Pools.here.inside = True
    try:
        yield
    finally:
        _Pools.here.inside = False
        if torch is not None:
            torch.set_num_threads(_Pools.torch_threads)
        with _Pools.lock:
            _Pools.inside -= 1
            for library, threads in _Pools.before if _Pools.inside == 0 else ():
                _set_threads(library, threads)


@lru_cache(maxsize=1)
def _blas_libraries(modules: int) -> list[Any]:
    """The BLAS libraries that are loaded; searching takes milliseconds, and only new modules bring new ones."""
    return list(ThreadpoolController().select(user_api="blas").lib_controllers)


def _set_threads(library: Any, threads: int) -> None:
    # threadpoolctl leaves OpenBLAS to the Python thread that set it first, and silently does nothing for the others.
    getattr(library, "_real_set_num_threads", library.set_num_threads)(threads)
