"""What the ranks of a ``torch.distributed`` process group tell each other: small objects, and sums of arrays.

Knows nothing of moments or models, so that :mod:`esvdfair.core` may call it without knowing torch.
"""

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray


def world_size() -> int:
    """Number of ranks of the initialised process group; 1 when there is none."""
    dist = _process_group()
    return 1 if dist is None else int(dist.get_world_size())


def all_gather(value: Any) -> list[Any]:
    """The value of every rank, in rank order, on every rank (values must be small and picklable)."""
    dist = _process_group()
    if dist is None:
        return [value]
    gathered: list[Any] = [None] * world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def all_sum(array: NDArray[np.float64]) -> NDArray[np.float64]:
    """Elementwise sum over the ranks; every rank passes the same shape."""
    dist = _process_group()
    if dist is None:
        return array
    torch = sys.modules["torch"]
    # nccl reduces only tensors on its own device; gloo takes them on the CPU.
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    total = torch.tensor(array, device=device)  # a copy: the caller's array stays as it is
    dist.all_reduce(total)
    return np.asarray(total.cpu().numpy(), dtype=np.float64)


def _process_group() -> Any:
    """``torch.distributed`` when a process group is initialised, else None. Never imports torch."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    return torch.distributed
