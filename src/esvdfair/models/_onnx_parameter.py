"""Weights and biases of linear layers, as they are stored in the tensors of an ONNX model."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

_FIELDS: dict[int, tuple[str, Any]] = {  # where a tensor holds its values when they are not raw bytes, and as what
    onnx.TensorProto.FLOAT: ("float_data", np.float32),
    onnx.TensorProto.DOUBLE: ("double_data", np.float64),
    onnx.TensorProto.FLOAT16: ("int32_data", np.uint16),
}


@dataclass(frozen=True)
class Parameter:
    """A tensor A seen as a layer's weight or bias: `scale · A`, or `scale · Aᵀ`, in the shape of the layer.

    Parameters
    ----------
    tensor : onnx.TensorProto
    shape : (m, n) of a weight, (m,) of a bias
    transposed : bool
        The tensor holds (n, m).
    scale : float
        Factor that the operator applies: alpha or beta of a Gemm.
    """

    tensor: onnx.TensorProto
    shape: tuple[int, ...]
    transposed: bool = False
    scale: float = 1.0

    @property
    def dtype(self) -> np.dtype[Any]:
        """In which the tensor is stored."""
        return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(self.tensor.data_type))

    def read(self) -> NDArray[np.float64]:
        """Values that the layer works with."""
        return self.scale * self._stored()

    def write(self, values: NDArray[Any], layer: str) -> None:
        """Store `values`, rounded to the tensor's dtype; entries equal to those of `read` keep every bit."""
        values = np.asarray(values, dtype=np.float64)
        new = np.where(values == self.read(), self._stored(), values / self.scale)
        with np.errstate(over="ignore"):
            rounded = new.astype(self.dtype)
        if not np.all(np.isfinite(rounded)):
            raise ValueError(f"new weights of layer {layer!r} are too large for {self.dtype}.")
        flat = np.ravel(rounded.T if self.transposed else rounded)
        if self.tensor.HasField("raw_data"):
            self.tensor.raw_data = flat.astype(self.dtype.newbyteorder("<")).tobytes()
            return
        field, kind = _FIELDS[self.tensor.data_type]
        stored = getattr(self.tensor, field)
        del stored[:]
        stored.extend(flat.view(kind).tolist())

    def _stored(self) -> NDArray[np.float64]:
        values = np.asarray(numpy_helper.to_array(self.tensor), dtype=np.float64)
        return values.reshape(self.shape[::-1]).T if self.transposed else values.reshape(self.shape)


def weight_parameter(layer: str, tensor: onnx.TensorProto, *, by_output: bool, scale: float) -> Parameter:
    """A weight stored as (outputs, inputs) if `by_output`, else as (inputs, outputs); a vector has one output."""
    if tensor.data_type not in _FIELDS:
        kind = onnx.TensorProto.DataType.Name(tensor.data_type)
        raise ValueError(
            f"the weight {tensor.name!r} of layer {layer!r} is {kind}; float16, float32 or float64 is needed."
        )
    dims = tuple(tensor.dims)
    if not dims or math.prod(dims[:-2]) != 1 or scale == 0:
        raise ValueError(
            f"the weight {tensor.name!r} of layer {layer!r} has shape {dims} and factor {scale:g}; one matrix and a "
            "factor other than 0 are needed."
        )
    rows, columns = dims[-2:] if len(dims) > 1 else (dims[0], 1)
    shape = (rows, columns) if by_output else (columns, rows)
    return Parameter(tensor, shape, transposed=not by_output, scale=scale)


def bias_parameter(tensor: onnx.TensorProto, width: int, scale: float = 1.0) -> Parameter | None:
    """A bias of `width` numbers along the last axis; None if the tensor is of another shape or type."""
    dims = tuple(tensor.dims)
    fits = math.prod(dims) == width and (width == 1 or dims[-1] == width)
    return Parameter(tensor, (width,), scale=scale) if fits and tensor.data_type in _FIELDS else None
