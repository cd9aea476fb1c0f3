"""Seeds -> named rows: what a method predicts is judged, saved a part of a seed at a time, and not made again.

A file appears whole or not at all, and equal runs give equal bytes, whatever their order and number of processes.
"""

import csv
import io
import json
import math
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esvdfair.core.checks import encode_groups
from esvdfair.core.metrics import ks_distance, ks_floor, mean_gap, variance_gap
from esvdfair.files import whole_file
from esvdfair.gather import few_threads
from reproduction import datasets
from reproduction.config import Experiment, Part, Variant
from reproduction.datasets import Examples

Array = NDArray[np.float64]

SHOWN_BINS = 90
_FORMAT = "esvdfair-seed-3"


@dataclass(frozen=True)
class Outcome:
    """What one method predicts for the evaluated rows, and what it says of itself (see :class:`Row`)."""

    variant: Variant
    prediction: Array
    met: bool | None = None
    mean_reached: float | None = None
    covariance_reached: float | None = None


@dataclass(frozen=True)
class Row:
    """What one method reached on one seed. No timings: equal runs give equal rows."""

    experiment: str
    preparation: str
    seed: int
    evaluated_on: str
    method: str  # what was run, as in Variant
    fitted_on: str
    group: str
    level: float | None
    mean_reduction: float | None
    covariance_reduction: float | None
    mse: float
    ks: float
    ks_floor: float  # what two samples of one distribution would show at these group sizes
    mean_gap: float  # largest differences of the groups' means and variances
    variance_gap: float
    met: bool | None = None  # whether `level` was met on the validation rows
    mean_reached: float | None = None  # by how much Σσ² really fell
    covariance_reached: float | None = None  # and Σσ⁴
    regret: float | None = None  # excess over the plug-in optimum (interpolated_regret)
    # By group, how many predictions fall in each bin of Experiment.shown_range; outer bins hold the rest.
    densities: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @cached_property
    def variant(self) -> Variant:
        return Variant(**{known.name: getattr(self, known.name) for known in fields(Variant)})


# --- predictions -> rows -------------------------------------------------------------------------------------------


def to_rows(outcomes: Sequence[Outcome], here: Examples, experiment: Experiment, seed: int) -> list[Row]:
    """The rows of one seed of one experiment, from what the methods predict for the evaluated rows ``here``."""
    groups: dict[str, Any] = {"sensitive_features": here.sensitive_features}
    return [
        Row(
            experiment=experiment.name,
            preparation=experiment.preparation,
            seed=seed,
            evaluated_on=experiment.evaluated_on,
            **asdict(outcome.variant),
            mse=float(np.mean((outcome.prediction - here.y) ** 2)),
            ks=ks_distance(outcome.prediction, **groups),
            ks_floor=ks_floor(**groups),
            mean_gap=mean_gap(outcome.prediction, **groups),
            variance_gap=variance_gap(outcome.prediction, **groups),
            met=outcome.met,
            mean_reached=outcome.mean_reached,
            covariance_reached=outcome.covariance_reached,
            densities=_densities(outcome.prediction, here, experiment.shown_range),
        )
        for outcome in outcomes
    ]


def with_regret(rows: Sequence[Row]) -> list[Row]:
    """The rows of a seed with their excess over the plug-in optimum, if it is there; it has none and comes last."""
    curve = np.array([(row.mse, row.ks) for row in rows if row.method == "optimum"])
    if not len(curve):
        return list(rows)
    rows = sorted(rows, key=lambda row: row.method == "optimum")
    constant, untouched = (next(r.mse for r in rows if r.method == name) for name in ("constant", "untouched"))
    regret = partial(interpolated_regret, curve_mse=curve[:, 0], curve_ks=curve[:, 1], gain=constant - untouched)
    return [row if row.method == "optimum" else replace(row, regret=regret(row.mse, row.ks)) for row in rows]


def interpolated_regret(mse: float, ks: float, *, curve_mse: Array, curve_ks: Array, gain: float) -> float:
    """(mse − mse of the optimum's curve at the same KS) / gain (docs/method.md, 2.7).

    ``gain`` is the mse of the best constant minus that of the untouched model. The curve is linear between its points,
    after each has been given the lowest error of any that is as fair: an error that sampling made larger at a looser
    level would flatter us. Fairer than the fairest point of the curve, the error of that point is taken, which also
    errs against us.
    """
    order = np.lexsort((curve_mse, curve_ks))
    lowest = np.minimum.accumulate(curve_mse[order])
    return (mse - float(np.interp(ks, curve_ks[order], lowest))) / gain


def _densities(prediction: Array, here: Examples, shown: tuple[float, float]) -> dict[str, tuple[int, ...]]:
    labels, codes = encode_groups(here.sensitive_features)
    edges = np.linspace(*shown, SHOWN_BINS + 1)[1:-1]  # without the outer edges: the outer bins are open
    bins = np.searchsorted(edges, prediction, side="right")
    counts = (np.bincount(bins[codes == code], minlength=SHOWN_BINS) for code in range(len(labels)))
    return {str(label): tuple(found.tolist()) for label, found in zip(labels, counts, strict=True)}


# --- rows -> files -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Folder:
    """The saved seeds of one experiment: ``out/law-paper/repaired/seed-33.json``, …

    Nothing is ever changed after it appeared, so that runs that share the folder can only do the same work twice.
    """

    out: Path
    experiment: Experiment

    def path(self, part: Part, seed: int) -> Path:
        return self.out / self.experiment.full_name / part / f"seed-{seed}.json"

    def finished(self) -> list[int]:
        """Seeds of which any part is saved, in order."""
        paths = (path for part in self.experiment.parts for path in self.path(part, 0).parent.glob("seed-*.json"))
        return sorted({int(name[1]) for path in paths if (name := re.fullmatch(r"seed-(\d+)\.json", path.name))})

    def missing(self, seed: int) -> list[Part]:
        """The parts of a seed that are not saved."""
        return [part for part in self.experiment.parts if not self.path(part, seed).exists()]

    def write(self, part: Part, seed: int, rows: Sequence[Row]) -> None:
        document = {
            "format": _FORMAT,
            "protocol": self.experiment.protocol(part),
            "rows": [asdict(row) for row in rows],
        }
        write_atomically(self.path(part, seed), json.dumps(document, indent=1, allow_nan=False) + "\n")

    def read(self, seed: int) -> list[Row]:
        """The rows of all parts of a seed that are saved; ValueError for a file of another kind or protocol."""
        missing = self.missing(seed)
        saved = [part for part in self.experiment.parts if part not in missing]
        parts = (_parse(self.path(part, seed), self.experiment.protocol(part)) for part in saved)
        return with_regret([row for rows in parts for row in rows])

    def rows(self, seeds: Container[int] | None = None) -> list[Row]:
        """The saved rows of these seeds, by default of all, in order."""
        return [row for seed in self.finished() if seeds is None or seed in seeds for row in self.read(seed)]

    def combine(self) -> Path:
        """Write the rows of all saved seeds as one CSV file, ``out/law-paper.csv``; returns its path."""
        path, text = self.out / f"{self.experiment.full_name}.csv", ""
        # Again where another run has finished a seed meanwhile, which may have written the file before.
        while text != (text := to_csv(self.rows())):
            write_atomically(path, text)
        return path


def _parse(path: Path, protocol: dict[str, Any]) -> list[Row]:
    """What a file holds, if this protocol made it."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["format"] != _FORMAT:
            raise KeyError(document["format"])
        saved = dict(document["protocol"])
        rows = [Row(**row) for row in document["rows"]]
        rows = [replace(r, densities={label: tuple(n) for label, n in r.densities.items()}) for r in rows]
        if not all(math.isfinite(value) for r in rows for value in (r.mse, r.ks, r.ks_floor, r.mean_gap)):
            raise TypeError("an error or a distance is no number")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not a saved seed ({error!r}); delete it to have it made again.") from error
    if saved != protocol:
        there, here = _settings(saved), _settings(protocol)
        names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
        changed = ", ".join(f"{name}: {there.get(name)} there, {here.get(name)} here" for name in names)
        raise ValueError(
            f"{path} was made by another protocol ({changed}); rows of two protocols must not be averaged. "
            "Choose another --out, or delete the folder."
        )
    return rows


def _settings(protocol: dict[str, Any]) -> dict[str, Any]:
    """Settings by name; those of a record, such as ``training``, are ``training.epochs``, …"""
    found: dict[str, Any] = {}
    for name, value in protocol.items():
        inner = value if isinstance(value, dict) else {}
        found |= {f"{name}.{key}": item for key, item in inner.items()} if inner else {name: value}
    return found


def to_csv(rows: Iterable[Row]) -> str:
    """One line a row; floats as the shortest decimals that give them back."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    names = [known.name for known in fields(Row) if known.name != "densities"]
    table.writerow(names)
    table.writerows([getattr(row, name) for name in names] for row in rows)  # None is an empty cell
    return text.getvalue()


def from_csv(path: Path) -> list[Row]:
    """The rows of a table, none where there is no such file."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [Row(**{name: _value(name, text) for name, text in line.items()}) for line in csv.DictReader(file)]


def _value(name: str, text: str) -> Any:
    if name in ("experiment", "preparation", "evaluated_on", "method", "fitted_on", "group"):
        return text
    return json.loads(text.lower()) if text else None  # a number, or whether a target was met


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file, whole or not at all, in a folder that is made when it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def parse_seeds(text: str) -> tuple[int, ...]:
    """Seeds from text such as ``33-82`` or ``33,35,40-42``: in order, each once."""
    seeds: set[int] = set()
    for part in text.split(","):
        ends = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        if not ends:
            raise ValueError(f"seeds {text!r} cannot be read; write a range such as 33-82, or a list such as 33,35,40.")
        first, last = int(ends[1]), int(ends[2] or ends[1])
        if last < first:
            raise ValueError(f"seeds {part.strip()!r} run backwards; write {last}-{first}.")
        seeds.update(range(first, last + 1))
    return tuple(sorted(seeds))


# --- many seeds ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """Folders whose rows come from one network: same data set, preparation, training and seed."""

    folders: tuple[Folder, ...]
    seed: int

    def missing(self) -> list[tuple[Folder, Part]]:
        return [(folder, part) for folder in self.folders for part in folder.missing(self.seed)]


def plan(experiments: Sequence[Experiment], seeds: Sequence[int], out: Path) -> tuple[list[Task], list[Task]]:
    """Tasks that are saved already and tasks to do; experiments on the same networks share a task."""
    shared: dict[tuple[object, ...], list[Folder]] = {}
    for experiment in experiments:
        if experiment.preparation not in experiment.preparations:
            there = ", ".join(experiment.preparations)
            raise ValueError(f"{experiment.name} has no preparation {experiment.preparation!r}; choose {there}.")
        network = experiment.dataset, experiment.preparation, experiment.training
        shared.setdefault(network, []).append(Folder(out, experiment))
    tasks = [Task(tuple(folders), seed) for seed in seeds for folders in shared.values()]
    for task in tasks:
        for folder in task.folders:
            folder.read(task.seed)  # or raises
    return [task for task in tasks if not task.missing()], [task for task in tasks if task.missing()]


def run(tasks: Sequence[Task], *, jobs: int, on_done: Callable[[], object] = lambda: None) -> None:
    """Run the tasks in ``jobs`` processes; ``on_done`` is called after each.

    An interrupt or an error lets no further task start; what is saved stays.
    """
    if not tasks:
        return
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")  # a forked torch may hang
    pool = ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=context, initializer=_start_worker)
    try:
        for future in as_completed([pool.submit(work, task) for task in tasks]):
            future.result()
            on_done()
    except BrokenProcessPool as error:
        raise RuntimeError("a worker process died, perhaps for want of memory; run again with fewer jobs.") from error
    except KeyboardInterrupt:
        for worker in set(multiprocessing.active_children()) - others:
            worker.terminate()  # a seed is saved whole or not at all
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def work(task: Task) -> None:
    """Train the network of a seed, run each part of an experiment that is not saved yet, save each at once.

    With one thread, however many jobs there are: sums of floats depend on their number.
    """
    from reproduction.methods import METHODS  # torch: in the workers only
    from reproduction.network import Shelf, train

    missing, first, seed = task.missing(), task.folders[0], task.seed
    if not missing:
        return
    dataset, preparation = first.experiment.dataset, first.experiment.preparation
    shelf = Shelf(first.out / "networks" / f"{dataset}-{preparation}")
    try:
        with few_threads(0):
            trained = train(datasets.load(dataset, preparation), first.experiment.training, seed, shelf)
            for folder, part in missing:
                outcomes = list(METHODS[part](trained, folder.experiment))
                here = trained.examples(folder.experiment.evaluated_on)
                folder.write(part, seed, to_rows(outcomes, here, folder.experiment, seed))
    except (ValueError, ArithmeticError) as error:  # no input of the user reaches a seed: this is a fault of ours
        names = ", ".join(folder.experiment.name for folder in task.folders)
        raise RuntimeError(f"seed {seed} of {names}, preparation {preparation}, failed: {error}") from error


def _start_worker() -> None:
    """An interrupt is for the parent, which ends its workers; one whose parent was killed would wait for ever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
