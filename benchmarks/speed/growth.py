"""Growth of time and memory over rows, width and the size of a file.

The benchmarks start this file as a script in processes of its own; the last line printed is JSON:

growth.py fit METHOD ROWS WIDTH                       one streaming fit: seconds, peak memory
growth.py repair MODEL TABLE                          `esvdfair repair` of a file: seconds, parses, peak memory
"""

import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.parquet
from skl2onnx import to_onnx
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPRegressor

from esvdfair import ESVDFair, ESVDFairWarning
from esvdfair.cli import main
from esvdfair.table_files import TableFile
from speed.measure import Goal, Section, make_rows, network, peak_megabytes, result, run_script, seconds, slope, stream

WORKER = Path(__file__).resolve()
LONG, SHORT = "transport", "parity"


def run_growth(
    rows: Sequence[int], width: int, *, memory: tuple[int, int], widths: Sequence[int], at: int, threads: int
) -> Section:
    """Streaming fits, each in a process of its own.

    Parameters
    ----------
    rows : numbers of rows of the first table, at one width
    memory : two of them, for each method, whose peaks are compared
    widths : of the second table, at ``at`` rows
    """

    def measure(method: str, rows: int, width: int) -> dict[str, float]:
        return result(run_script(WORKER, "fit", method, rows, width, threads=threads))

    parity = {n: measure(SHORT, n, width) for n in sorted({*rows, *memory})}
    transport = {n: measure(LONG, n, width) for n in memory}
    by_width = {n: measure(SHORT, at, n) for n in widths}
    few, many = memory
    goals = [
        Goal(f"{name}: peak at {many:,} rows over that at {few:,}", found[many]["peak"] / found[few]["peak"], 1.2)
        for name, found in ((SHORT, parity), (LONG, transport))
    ]
    first: list[Sequence[object]] = [("method", "rows", "s", "peak, MB")]
    for name, found in ((SHORT, parity), (LONG, transport)):
        first += [(name, f"{n:,}", f"{m['seconds']:.2f}", f"{m['peak']:.0f}") for n, m in found.items()]
    second: list[Sequence[object]] = [("method", "width", "s", "peak, MB")]
    second += [(SHORT, n, f"{m['seconds']:.2f}", f"{m['peak']:.0f}") for n, m in by_width.items()]
    slopes = [("log-log slope of", "time, all", "time, last two", "peak, all", "peak, last two")]
    slopes += [_slopes("rows", parity), _slopes("width", by_width)]
    return Section(
        "Growth",
        f'`ESVDFair(network, method=…, targets="labels").fit(make_batches)`: rows are made batch by batch (which is in '
        f"the time) and streamed through a network of one hidden layer. First table: width {width}. Second: {at:,} "
        "rows. The peak is the process's largest resident size, with Python, torch and SciPy in it.",
        [first, second, slopes],
        goals,
        [
            "Over rows the time goes from what a fit costs anyway (the factorisations, judging) to one batch after "
            "another: slope 1 at the end. The peak rises until the bounded samples are full (60,000 rows that fit, "
            "100,000 that judge) and then stays. Over the width XᵀX grows as its square, the factorisations as its "
            "cube.",
        ],
    )


def _slopes(name: str, found: dict[int, dict[str, float]]) -> tuple[str, ...]:
    sizes = list(found)
    values = []
    for part in ("seconds", "peak"):
        measured = [m[part] for m in found.values()]
        values += [slope(sizes, measured), slope(sizes[-2:], measured[-2:])]
    return (name, *(f"{value:.2f}" for value in values))


def run_files(megabytes: tuple[int, int], threads: int) -> Section:
    """`esvdfair repair` of a CSV and a Parquet file, small and large, each in a process of its own."""
    table: list[Sequence[object]] = [("file", "MB", "rows", "s", "parses", "peak, MB")]
    goals = []
    with tempfile.TemporaryDirectory() as folder:
        model, block = _write_model(Path(folder)), _people()
        found: dict[str, list[dict[str, float]]] = {"csv": [], "parquet": []}
        per_block = len(block.to_csv(index=False)) / 1e6
        for size in megabytes:
            blocks = max(1, round(size / per_block))
            for kind, write in (("csv", _write_csv), ("parquet", _write_parquet)):
                path = Path(folder, f"people.{kind}")
                write(path, block, blocks)
                measured = result(run_script(WORKER, "repair", model, path, threads=threads))
                found[kind].append(measured)
                row = (f"{path.stat().st_size / 1e6:.0f}", f"{blocks * len(block):,}", f"{measured['seconds']:.1f}")
                table.append((kind, *row, f"{measured['parses']:.0f}", f"{measured['peak']:.0f}"))
                path.unlink()
    for kind, (small, large) in found.items():
        goals.append(Goal(f"{kind}: parses of the large file", large["parses"], 2))
        goals.append(Goal(f"{kind}: peak of the large file over that of the small", large["peak"] / small["peak"], 1.2))
    return Section(
        "Files",
        "`esvdfair repair model.onnx people.csv --method parity`, a network of 16 inputs and 64 hidden units. The "
        "Parquet files hold the same rows. A parse reads every row of the file once; before, its bytes are hashed. "
        "Seconds by the clock.",
        [table],
        goals,
    )


def _people(rows: int = 50_000) -> pd.DataFrame:
    x, y, sex = make_rows(rows)
    names = [f"x{i}" for i in range(x.shape[1])]
    return pd.DataFrame(x.astype(np.float64), columns=names).round(6).assign(y=np.round(y, 6), sex=sex)


def _write_model(folder: Path) -> Path:
    x, y, _ = make_rows(2000)
    model = MLPRegressor(hidden_layer_sizes=(64,), max_iter=20, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(x, y)
    path = folder / "model.onnx"
    path.write_bytes(to_onnx(model, x[:1]).SerializeToString())
    return path


def _write_csv(path: Path, block: pd.DataFrame, blocks: int) -> None:
    header, _, rows = block.to_csv(index=False).partition("\n")
    with path.open("w") as file:
        file.write(f"{header}\n")
        for _ in range(blocks):
            file.write(rows)


def _write_parquet(path: Path, block: pd.DataFrame, blocks: int) -> None:
    table = pyarrow.Table.from_pandas(block)
    with pyarrow.parquet.ParquetWriter(path, table.schema) as writer:
        for _ in range(blocks):
            writer.write_table(table)


# --- what the processes do -----------------------------------------------------------------------------------------


def fit(method: str, rows: int, width: int) -> dict[str, float]:
    """Stream the rows through ESVDFair; they are made batch by batch, which is in the time."""
    fair = ESVDFair(network(width, hidden=1), method=method, targets="labels")
    took = seconds(lambda: fair.fit(lambda: stream(rows)))
    return {"seconds": took, "peak": peak_megabytes()}


def repair(model: str, table: str) -> dict[str, float]:
    """Run the command on a file; a parse is one walk through its chunks."""
    parses = 0

    def counted(frames: Callable[..., Any]) -> Callable[..., Any]:
        def walk(*arguments: Any, **options: Any) -> Any:
            nonlocal parses
            parses += 1
            return frames(*arguments, **options)

        return walk

    for kind in TableFile.__subclasses__():
        kind.frames = counted(kind.frames)  # type: ignore[method-assign]
    words = ["repair", model, table, "--sensitive", "sex", "--target", "y", "--method", "parity"]
    start = time.perf_counter()
    main([*words, "-o", f"{table}.onnx", "--force"], standalone_mode=False)
    return {"seconds": time.perf_counter() - start, "parses": parses, "peak": peak_megabytes()}


if __name__ == "__main__":
    warnings.simplefilter("ignore", ESVDFairWarning)
    task, *arguments = sys.argv[1:]
    if task == "fit":
        found = fit(arguments[0], *map(int, arguments[1:]))
    else:
        found = repair(*arguments)
    print(json.dumps(found))
