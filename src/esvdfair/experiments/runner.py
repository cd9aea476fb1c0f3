"""Many seeds: what is saved is not made again, what is not is made by processes of one thread each."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import wait
from pathlib import Path

from esvdfair.distributed import few_threads
from esvdfair.experiments.config import Experiment, Preparation, preparations_of
from esvdfair.experiments.rows import Folder, judge


@dataclass(frozen=True)
class Task:
    """Experiments that share the network of one seed: same data set, preparation and training."""

    experiments: tuple[Experiment, ...]
    preparation: Preparation
    seed: int
    out: Path


def plan(
    runs: Sequence[tuple[Experiment, Preparation]], seeds: Sequence[int], out: Path
) -> tuple[list[Task], list[Task]]:
    """Tasks that are saved already and tasks to do; experiments on the same networks share a task.

    Raises
    ------
    ValueError
        When a data set has no such preparation, or a saved seed was made by another protocol.
    """
    shared: dict[tuple[object, ...], list[Experiment]] = {}
    for experiment, preparation in runs:
        if preparation not in preparations_of(experiment):
            there = ", ".join(preparations_of(experiment))
            raise ValueError(f"{experiment.name} has no preparation {preparation!r}; choose {there}.")
        shared.setdefault((experiment.dataset, experiment.training, preparation), []).append(experiment)
    tasks = [
        Task(tuple(experiments), key[-1], seed, out)  # type: ignore[arg-type]  # the last item is the preparation
        for seed in seeds
        for key, experiments in shared.items()
    ]
    done = [task for task in tasks if _is_saved(task)]
    return done, [task for task in tasks if task not in done]


def run(tasks: Sequence[Task], *, jobs: int, on_done: Callable[[], object] = lambda: None) -> None:
    """Run the tasks in ``jobs`` processes; ``on_done`` is called after each.

    An interrupt or an error lets no further task start; what is saved stays.
    """
    if not tasks:
        return
    if find_spec("torch") is None:
        raise ImportError("the experiments train networks with PyTorch: pip install 'esvdfair[torch]'.")
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


def _is_saved(task: Task) -> bool:
    folders = [Folder(task.out, experiment, task.preparation) for experiment in task.experiments]
    for folder in folders:
        folder.read(task.seed)  # or raises
    return not any(folder.missing(task.seed) for folder in folders)


def work(task: Task) -> None:
    """Train the network of a seed, run each part of an experiment that is not saved yet, save each at once.

    With one thread, however many jobs there are: sums of floats depend on their number.
    """
    from esvdfair.experiments.methods import METHODS  # torch: in the workers only
    from esvdfair.experiments.network import Shelf, load, train

    folders = [Folder(task.out, experiment, task.preparation) for experiment in task.experiments]
    missing = [(folder, part) for folder in folders for part in folder.missing(task.seed)]
    if not missing:
        return
    first = task.experiments[0]
    shelf = Shelf(task.out / "networks" / f"{first.dataset}-{task.preparation}")
    try:
        with few_threads(0):
            trained = train(load(first.dataset, task.preparation), first.training, task.seed, shelf)
            for folder, part in missing:
                experiment = folder.experiment
                outcomes = list(METHODS[part](trained, experiment))
                here = trained.examples(experiment.evaluated_on)
                folder.write(part, task.seed, judge(outcomes, here, experiment, task.preparation, task.seed))
    except (ValueError, ArithmeticError) as error:  # no input of the user reaches a seed: this is a fault of ours
        names = ", ".join(experiment.name for experiment in task.experiments)
        raise RuntimeError(f"seed {task.seed} of {names}, preparation {task.preparation}, failed: {error}") from error


def _start_worker() -> None:
    """An interrupt is for the parent, which ends its workers; one whose parent was killed would wait for ever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
