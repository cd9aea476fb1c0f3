"""The few things the data flow does with arrays that may be NumPy's or a framework's, without leaving the device."""

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray


def take_rows(values: Any, index: NDArray[np.intp]) -> NDArray[Any]:
    """Some rows as NumPy; of a tensor only these rows leave its device (bfloat16 becomes float32)."""
    if isinstance(values, np.ndarray):
        return values[index]
    torch = sys.modules["torch"]
    picked = values.index_select(0, torch.as_tensor(index, device=values.device)).cpu()
    return np.asarray(picked.float().numpy() if picked.dtype == torch.bfloat16 else picked.numpy())


def count_not_finite(values: Any) -> int:
    """How many values are NaN or infinite; one number leaves the device."""
    finite = np.isfinite(values) if isinstance(values, np.ndarray) else values.isfinite()
    return int((~finite).sum())
