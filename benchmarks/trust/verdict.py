"""How a trial is judged: a clear error, a right result, or what must not be (silent, raw, hang).

A result is right when it was compared with one that is known; that nothing was raised earns nothing. An error is clear
when it is a ValueError or TypeError (OSError for files) that a `raise` of this package makes, or that names the
parameter. Warnings are errors, except the package's own, which are for the user to read.
"""

import linecache
import signal
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import esvdfair
from esvdfair.exceptions import ESVDFairWarning, InputError

PACKAGE = str(Path(esvdfair.__file__).parent)
LIMIT = 20
"""Seconds after which a trial hangs."""


class Trial(NamedTuple):
    """Something to run. ``right`` says of its result whether it is right, or why not; None: only an error will do."""

    name: str
    run: Callable[[], Any]
    right: Callable[[Any], bool | str] | None
    parameter: str = ""  # a clear error may name it
    own: type[Exception] | None = None  # an error of the caller's own code, which is to come through as it is


@dataclass
class Tally:
    """Verdicts of many trials."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, name: str, verdict: str, detail: str = "") -> None:
        self.counts[verdict] += 1
        if verdict not in ("clear", "right"):
            self.failures.append(f"{verdict}: {name}: {detail}")

    def row(self, name: str) -> str:
        """A line of the table."""
        clear, right = self.counts["clear"], self.counts["right"]
        return f"| {name} | {self.counts.total():,} | {clear:,} | {right:,} | {len(self.failures)} |"


class Hang(BaseException):
    """A trial took too long; no `except Exception` on the way may swallow it."""


def judge_all(trials: Iterable[Trial]) -> Tally:
    tally = Tally()
    for trial in trials:
        tally.add(trial.name, *judge(trial))
    return tally


def judge(trial: Trial) -> tuple[str, str]:
    """The verdict on one trial, and what it rests on."""

    def ring(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(LIMIT)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", ESVDFairWarning)
            result = trial.run()
    except Hang:
        return "hang", f"more than {LIMIT} seconds"
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        words = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {str(error)[:160]}"
        clear = type(error) is trial.own or is_clear(error, last, trial.parameter)
        return ("clear" if clear else "raw"), words
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    if trial.right is None:
        return "silent", f"gave {str(result)[:200]}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ESVDFairWarning)
        found = trial.right(result)
    return ("right", "") if found is True else ("silent", f"another result than the known one: {found}")


def is_clear(error: Exception, last: traceback.FrameSummary, parameter: str) -> bool:
    """Whether the package has said this itself, or the message names the parameter."""
    if isinstance(error, InputError) or (isinstance(error, OSError) and error.filename):
        return True
    if not isinstance(error, ValueError | TypeError | OSError) or not str(error):
        return False
    ours = last.filename.startswith(PACKAGE) and linecache.getline(last.filename, last.lineno or 0).lstrip()
    return bool(ours and ours.startswith("raise")) or (bool(parameter) and parameter in str(error))
