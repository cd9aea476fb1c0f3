"""How a process shares the work: what ranks of ``torch.distributed`` tell each other, and how many threads it takes.

Alone, a process answers for one rank.

Knows nothing of moments or models, so that :mod:`esvdfair.core` may call it without knowing torch.

No rank is left waiting for one that has failed. Every exchange begins with a vote, in which each rank says whether it
has failed and whether it is still reading its rows. A rank that raises inside :func:`together` votes once more, as
failed, and leaves with its own error; the others meet that vote in whichever exchange they come to next, or between
two batches of a pass (:func:`reading`), and raise :class:`RankError`.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from threading import Lock, local
from time import monotonic
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

T = TypeVar("T")

MESSAGE_BYTES = 4 * 2**20
"""Of rows that one rank sends another at once."""

PULSE_SECONDS = 2.0
"""How often ranks vote while they read."""


class RankError(RuntimeError):
    """Another rank has failed, or the connection to it is lost."""


def world_size() -> int:
    """Number of ranks of the initialised process group; 1 when there is none."""
    dist = _process_group()
    return 1 if dist is None else int(dist.get_world_size())


def rank() -> int:
    """Position of this process among the ranks; 0 when there is no process group."""
    dist = _process_group()
    return 0 if dist is None else int(dist.get_rank())


# --- exchanges: all ranks call them in the same order --------------------------------------------------------------


def all_gather(value: T) -> list[T]:
    """The value of every rank, in rank order, on every rank (values must be small and picklable)."""
    if world_size() == 1:
        return [value]
    _agree()
    return _gather_objects(value)


def all_sum(array: NDArray[np.float64]) -> NDArray[np.float64]:
    """Elementwise sum over the ranks; every rank passes the same shape."""
    if world_size() == 1:
        return array
    _agree()
    total = _torch().tensor(array, device=_device())  # a copy: the caller's array stays as it is
    with _connected() as dist:
        dist.all_reduce(total)
    return np.asarray(total.cpu().numpy(), dtype=np.float64)


def first_rank_rows(array: NDArray[Any], places: Sequence[NDArray[np.intp]] | None = None) -> NDArray[Any]:
    """The rows of every rank on the first rank, each at its place; on the others no rows.

    Every rank passes the same dtype and width, and the places of all ranks' rows; else they stand one rank's after the
    other's. Rows travel as they are, not pickled and not padded, a few megabytes at a time.
    """
    if world_size() == 1:
        return array
    if places is None:
        places = np.split(np.arange(sum(counts := all_gather(len(array)))), np.cumsum(counts)[:-1])
    _agree()
    step = max(1, MESSAGE_BYTES // max(array.itemsize * int(np.prod(array.shape[1:])), 1))
    if rank() > 0:
        for start in range(0, len(array) if array.size else 0, step):
            _send_bytes(np.ascontiguousarray(array[start : start + step]).reshape(-1).view(np.uint8))
        return array[:0]
    whole = np.empty((sum(map(len, places)), *array.shape[1:]), dtype=array.dtype)
    whole[places[0]] = array
    received = np.empty((step, *array.shape[1:]), dtype=array.dtype)
    for source, place in enumerate(places[1:], 1):
        for start in range(0, len(place) if whole.size else 0, step):
            part = received[: len(place) - start]
            _receive_bytes(part.reshape(-1).view(np.uint8), source)
            whole[place[start : start + step]] = part
    return whole


def broadcast(make: Callable[[], T], source: int = 0) -> T:
    """What one rank makes, on every rank; the others do not call ``make``."""
    if world_size() == 1:
        return make()
    box: list[Any] = [make() if rank() == source else None]
    _agree()
    with _connected() as dist:
        dist.broadcast_object_list(box, src=source)
    made: T = box[0]
    return made


# --- failure -------------------------------------------------------------------------------------------------------

_INSIDE: ContextVar[bool] = ContextVar("inside together()", default=False)


@contextmanager
def together() -> Iterator[None]:
    """Work of all ranks that ends well on all of them or on none.

    An error on one rank raises :class:`RankError` on the others: "rank 1 failed: ValueError: …". Inside another
    ``together`` this one does nothing, since the outer one will tell.
    """
    if world_size() == 1 or _INSIDE.get():
        yield
        return
    token = _INSIDE.set(True)
    try:
        yield
        _agree()
    except RankError:
        raise
    except Exception as error:
        with suppress(RankError):  # its own error says more
            _agree(error)
        raise
    finally:
        _INSIDE.reset(token)


@contextmanager
def reading() -> Iterator[Callable[[], None]]:
    """A pass of this rank over its rows; call what it gives after every batch, to hear of failures elsewhere.

    The ranks need not have as many batches, nor be as fast: nobody waits for a vote here.
    """
    if world_size() == 1:
        yield lambda: None
        return
    pulse = _Pulse()
    try:
        yield pulse.beat
    finally:
        pulse.stop()


class _Vote:
    """A sum over the ranks of who has failed and who is still reading, under way."""

    def __init__(self, *, failed: bool = False, reading: bool = False) -> None:
        self._counts = _torch().tensor([failed, reading], dtype=_torch().int32, device=_device())
        with _connected() as dist:
            self._work = dist.all_reduce(self._counts, async_op=True)

    def is_over(self) -> bool:
        return bool(self._work.is_completed())

    def result(self) -> tuple[int, int]:
        """Wait for the other ranks: how many have failed, how many are still reading."""
        with _connected():
            self._work.wait()
            failed, reading = self._counts.tolist()
        return failed, reading


class _Pulse:
    """The votes of a rank while it reads, one every few seconds."""

    def __init__(self) -> None:
        self._vote: _Vote | None = None
        self._due = monotonic() + PULSE_SECONDS

    def beat(self) -> None:
        if self._vote is not None and self._vote.is_over():
            self.stop()
        if self._vote is None and monotonic() >= self._due:
            self._vote = _Vote(reading=True)
            self._due = monotonic() + PULSE_SECONDS

    def stop(self) -> None:
        """Bring the vote that is under way to its end: a rank that left it open would stop all later ones."""
        vote, self._vote = self._vote, None
        if vote is not None and vote.result()[0]:
            _report(None)


def _agree(error: Exception | None = None) -> None:
    """Wait until no rank is reading any more; raise RankError when another rank has failed.

    With an error of its own this rank tells the others and returns.
    """
    while True:
        failed, reading = _Vote(failed=error is not None).result()
        if failed:
            return _report(error)
        if not reading:
            return None


def _report(error: Exception | None) -> None:
    """After a vote that failed: who, and why."""
    said = _gather_objects(None if error is None else f"{type(error).__name__}: {error}")
    if error is None:
        raise RankError("; ".join(f"rank {i} failed: {words}" for i, words in enumerate(said) if words is not None))


# --- torch.distributed ---------------------------------------------------------------------------------------------


@contextmanager
def process_group() -> Iterator[None]:
    """The process group that torchrun's environment variables describe; gloo, which needs no GPU."""
    import torch.distributed as dist

    with _connected_by("cannot meet the other ranks"):
        dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def started_by_torchrun() -> bool:
    """Whether this process is one of several that torchrun has started."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def _gather_objects(value: Any) -> list[Any]:
    gathered: list[Any] = [None] * world_size()
    with _connected() as dist:
        dist.all_gather_object(gathered, value)
    return gathered


def _send_bytes(values: NDArray[np.uint8]) -> None:
    with _connected() as dist:
        dist.send(_torch().from_numpy(values).to(_device()), dst=0)


def _receive_bytes(values: NDArray[np.uint8], source: int) -> None:
    received = _torch().empty(len(values), dtype=_torch().uint8, device=_device())
    with _connected() as dist:
        dist.recv(received, src=source)
    values[...] = received.cpu().numpy()


@contextmanager
def _connected() -> Iterator[Any]:
    with _connected_by("lost the connection to another rank: it has ended or cannot be reached, its output says why"):
        yield _process_group()


@contextmanager
def _connected_by(otherwise: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # what torch raises when a connection breaks or a wait takes too long
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        reason = re.sub(r"^\[[^]]*] *", "", first)  # without the line of gloo's source
        raise RankError(f"{otherwise} ({reason})") from error


def _device() -> Any:
    """nccl moves only tensors on its own device; gloo takes them on the CPU."""
    return _torch().device("cuda" if _process_group().get_backend() == "nccl" else "cpu")


def _torch() -> Any:
    return sys.modules["torch"]


def _process_group() -> Any:
    """``torch.distributed`` when a process group is initialised, else None. Never imports torch."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    return torch.distributed


# --- threads -------------------------------------------------------------------------------------------------------

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
            libraries = ThreadpoolController().select(user_api="blas").lib_controllers
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


def _set_threads(library: Any, threads: int) -> None:
    # threadpoolctl leaves OpenBLAS to the Python thread that set it first, and silently does nothing for the others.
    getattr(library, "_real_set_num_threads", library.set_num_threads)(threads)
