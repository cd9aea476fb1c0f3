"""What the benchmarks run in processes of their own; the last line printed is JSON.

worker.py fit METHOD ROWS WIDTH                       one streaming fit: seconds, peak memory
worker.py rank RANK WORLD FOLDER ROWS WIDTH REPEATS   one of WORLD processes that share the rows
"""

import json
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from esvdfair import ESVDFair, ESVDFairWarning
from esvdfair.core.moments import GroupMoments
from esvdfair.models import adapt
from speed.measure import peak_megabytes, seconds
from speed.models import network, stream


def fit(method: str, rows: int, width: int) -> dict[str, float]:
    """Stream the rows through ESVDFair; they are made batch by batch, which is in the time."""
    fair = ESVDFair(network(width, hidden=1), method=method, targets="labels")
    took = seconds(lambda: fair.fit(lambda: stream(rows)))
    return {"seconds": took, "peak": peak_megabytes()}


def rank(own: int, world: int, folder: str, rows: int, width: int, repeats: int) -> dict[str, float]:
    """Moments, then a whole fit, of rows that ``world`` processes share; seconds from start line to finish line."""
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=own, world_size=world)
    model = network(width, hidden=1)
    adapter, layer = adapt(model), adapt(model).layers(np.zeros((1, 16), dtype=np.float32))[-1].name
    shard = list(stream(rows, first=own, step=world))

    def moments() -> None:
        seen = GroupMoments()
        for x, _, groups in shard:
            inputs, _ = adapter.capture(x, [layer])
            seen.update(inputs[layer], groups)
        seen.all_reduce()

    def whole_fit() -> None:
        ESVDFair(model, method="parity", targets="labels").fit(lambda: iter(shard))

    best = {}
    for name, function in (("moments", moments), ("fit", whole_fit)):
        times = []
        for _ in range(repeats):
            _line_up(world)
            start = time.perf_counter()
            function()
            _line_up(world)
            times.append(time.perf_counter() - start)
        best[name] = min(times)
    if world > 1:
        dist.destroy_process_group()
    return best


def _line_up(world: int) -> None:
    if world > 1:
        dist.barrier()


if __name__ == "__main__":
    warnings.simplefilter("ignore", ESVDFairWarning)
    task, *arguments = sys.argv[1:]
    if task == "fit":
        found = fit(arguments[0], *map(int, arguments[1:]))
    else:
        found = rank(int(arguments[0]), int(arguments[1]), arguments[2], *map(int, arguments[3:]))
    print(json.dumps(found))
