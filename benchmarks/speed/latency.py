"""Inference latency of the repaired model over that of the original."""

import copy
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import nn

from esvdfair import ESVDFair
from speed.measure import INPUTS, Goal, Section, make_rows, network

NOISE = 1.05


def run(width: int, batches: Sequence[int], repeats: int, threads: int) -> Section:
    """Original, a plain copy of it, and the repaired model in turn, as PyTorch and as ONNX."""
    model = network(width)
    x, y, a = make_rows(20_000)
    table: list[Sequence[object]] = [
        ("runtime", "rows at once", "original, ms", "repaired / original", "copy / original (noise)")
    ]
    goals = []
    for runtime, given, caller in (
        ("torch", model, _torch_caller),
        ("onnxruntime", to_onnx(model), lambda m: _onnx_caller(m, threads)),
    ):
        repaired = ESVDFair(given, method="parity", targets="labels").fit(x, y, sensitive_features=a).estimator_
        calls = [caller(m) for m in (given, copy.deepcopy(given), repaired)]
        for rows in batches:
            original, same, after = _medians(calls, x[:rows], repeats)
            ratio = after / original
            table.append((runtime, rows, f"{1e3 * original:.3f}", f"{ratio:.3f}", f"{same / original:.3f}"))
            goals.append(Goal(f"{runtime}, {rows} rows: repaired over original", ratio, NOISE))
    return Section(
        "Inference latency",
        f"A network of two hidden layers of width {width}, repaired by parity; median of {repeats} calls, the three "
        "models taking turns. A copy of the original against the original shows the noise. Goal: 1.00 within it, here "
        "5 %.",
        [table],
        goals,
    )


def _medians(calls: Sequence[Callable[[Any], object]], x: Any, repeats: int) -> list[float]:
    for call in calls:
        call(x)
    times: list[list[float]] = [[] for _ in calls]
    for i in range(repeats):
        for j in range(len(calls)):  # another one begins each round
            k = (i + j) % len(calls)
            start = perf_counter()
            calls[k](x)
            times[k].append(perf_counter() - start)
    return [median(own) for own in times]


def _torch_caller(model: nn.Module) -> Callable[[Any], object]:
    def call(x: Any) -> object:
        with torch.inference_mode():
            return model(torch.from_numpy(x))

    return call


def _onnx_caller(model: bytes, threads: int) -> Callable[[Any], object]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return lambda x: session.run(None, {"x": x})


def to_onnx(model: nn.Sequential) -> bytes:
    """The network as an ONNX file, written node by node."""
    from onnx import TensorProto, checker, helper, numpy_helper

    nodes, weights, last = [], [], "x"
    for i, part in enumerate(model):
        if isinstance(part, nn.Linear):
            for name, value in (("weight", part.weight), ("bias", part.bias)):
                weights.append(numpy_helper.from_array(np.asarray(value.detach()), f"{i}.{name}"))
            nodes.append(helper.make_node("Gemm", [last, f"{i}.weight", f"{i}.bias"], [f"h{i}"], transB=1))
        else:
            nodes.append(helper.make_node("Relu", [last], [f"h{i}"]))
        last = f"h{i}"
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", INPUTS])]
    outputs = [helper.make_tensor_value_info(last, TensorProto.FLOAT, ["rows", 1])]
    graph = helper.make_graph(nodes, "network", inputs, outputs, weights)
    file = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    checker.check_model(file)
    return bytes(file.SerializeToString())
