"""docs/reproduction.md from tables of rows: no number in it that a run did not produce (or the paper print).

Its words are in reproduction.md beside this file. It shows the figures that `esvdfair reproduce` draws, from the folder
reproduction/ beside it.
"""

import shutil
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

import numpy as np

from esvdfair.core.edits import PAPER_REDUCTIONS
from esvdfair.experiments.config import (
    ABLATION_COVARIANCE,
    ABLATION_MEAN,
    COMPAS,
    LAW,
    PAPER,
    Experiment,
    Preparation,
    Variant,
)
from esvdfair.experiments.figures import draw
from esvdfair.experiments.rows import Row, from_csv, to_csv, with_regret, write_atomically
from esvdfair.experiments.tables import Statistic, Table, describe, markdown

Saved = dict[str, tuple[Table, list[Row]]]
"""By the name of a table, such as "law-paper"."""

# The error that `transport` is to reach on the test rows when KS ≤ 0.10 is asked for, with the paper's preparation.
_GOALS = {"law-paper": 0.0555, "compas-paper": 0.1985}

_UNTOUCHED, _REFITTED = Variant("untouched"), Variant("refitted")
_PREDICTED = [
    Variant(method, on, "predicted") for method in ("barycenter", "private_histogram") for on in ("targets", "scores")
]
_ERRATA = [Variant.reduced(f"paper_{name}", *PAPER_REDUCTIONS) for name in ("printed_cubic", "unguarded_solve")]
_ALGORITHM_2 = Variant.reduced("algorithm_2", *PAPER_REDUCTIONS)
_COMPARISONS = ("law-paper", "compas-paper", "law-clean", "compas-clean")
_RUNS: dict[str, tuple[Experiment, Preparation]] = {
    "law-paper": (LAW, "paper"),
    "compas-paper": (COMPAS, "paper"),
    "law-clean": (LAW, "clean"),
    "compas-clean": (COMPAS, "clean"),
    "ablation-mean-paper": (ABLATION_MEAN, "paper"),
    "ablation-covariance-paper": (ABLATION_COVARIANCE, "paper"),
}


def write_report(out: Path, seeds: Sequence[int]) -> str:
    """The document as Markdown, from the tables ``law-paper.csv``, … in the folder ``out``.

    A file note.txt there, which may say what made the rows, stands at its head.

    Raises
    ------
    ValueError
        When there is no table of law or COMPAS.
    """
    saved: Saved = {}
    for name, run in _RUNS.items():
        rows = [row for row in from_csv(out / f"{name}.csv") if row.seed in set(seeds)]
        saved[name] = Table.of(rows, *run), rows
    if not saved["law-paper"][1] or not saved["compas-paper"][1]:
        raise ValueError(f"{out} holds no finished seed of law and compas; run `esvdfair reproduce all` first.")
    note = out / "note.txt"
    fields = {
        **{name: _section(name, table) for name, (table, _) in saved.items()},
        "note": note.read_text(encoding="utf-8").strip() if note.exists() else "",
        "extent": _extent([table for table, _ in saved.values()]),
        "differences": _differences(saved),
        "errata": markdown(_errata(saved)),
        "goals": markdown(_goals(saved)),
        "equal-ks": markdown(_equal_ks(saved)),
    }
    text = files("esvdfair.experiments").joinpath("reproduction.md").read_text("utf-8").format_map(fields)
    return text.replace("\n\n\n\n", "\n\n")


def join(out: Path, onto: Path) -> None:
    """Put the tables of a run into the folder of another: rows of the same seed and method are replaced.

    Their trade-offs are drawn anew; densities, which tables do not hold, come from a run of all methods alone.
    """
    for name, run in _RUNS.items():
        ours = from_csv(out / f"{name}.csv")
        rows = {(row.seed, row.variant): row for row in [*from_csv(onto / f"{name}.csv"), *ours]}
        by_seed: dict[int, list[Row]] = {}
        for row in rows.values():
            by_seed.setdefault(row.seed, []).append(row)
        joined = [row for seed in sorted(by_seed) for row in with_regret(by_seed[seed])]
        if ours:
            write_atomically(onto / f"{name}.csv", to_csv(joined))
            draw(joined, *run, onto)
        if ours and {row.variant for row in ours} == {row.variant for row in joined}:
            shutil.copy(out / "figures" / f"{name}-densities.png", onto)


def _extent(tables: Sequence[Table]) -> str:
    counts, seeds = {line.seeds for table in tables for line in table.lines}, tables[0].seeds
    exact = f"{len(seeds)} seeds ({seeds[0]}–{seeds[-1]})"
    if len(counts) == 1:
        return f"Each table is over {exact}."
    return f"The first table is over {exact}; others, and lines that have fewer, say their own."


def _section(name: str, table: Table) -> str:
    title = f"{table.experiment.name}, {table.extent}" if table.seeds else table.experiment.name
    if not table.seeds:
        return f"### {title}\n\nNo seed is saved."
    figures = (f"![{title}: {what}](reproduction/{name}-{file}.png)" for what, file in
               (("error over KS", "tradeoff"), ("densities", "densities")))  # fmt: skip
    said = []
    if not table.experiment.is_comparison:
        errors, distances = [line.mse.mean for line in table.lines], [line.ks.mean for line in table.lines]
        monotone = errors == sorted(errors) and distances == sorted(distances, reverse=True)
        said = [f"{'The error rises and KS falls' if monotone else 'The means are not monotone'} along the parameter."]
    return "\n\n".join([f"### {title}", table.to_markdown(), *figures, *said])


def _differences(saved: Saved) -> str:
    found = [
        f"- {e.name}, {describe(line.variant)}: ours {line.mse} / {line.ks}, "
        f"printed {line.printed.mse:.3f} / {line.printed.ks:.3f}."
        for e in (LAW, COMPAS)
        for line in saved[f"{e.name}-paper"][0].lines
        if line.printed is not None and not line.agrees
    ]
    if not found:
        return "Every printed row is reproduced within one printed standard deviation."
    return "\n".join(["What differs:", "", *found])


def _errata(saved: Saved) -> list[list[str]]:
    """What every slip of the paper does to law and COMPAS."""
    cells = [["", *(f"{data}: {what}" for data in ("law", "COMPAS") for what in ("MSE", "KS", "differs by", "missed"))]]
    for variant in (_UNTOUCHED, PAPER, *_ERRATA, _ALGORITHM_2, *_PREDICTED):
        line = [describe(variant)]
        for table, rows in (saved["law-paper"], saved["compas-paper"]):
            line += [str(table[variant].mse), str(table[variant].ks)]
            line += _against_the_paper(rows, variant) if variant in _ERRATA else ["", ""]
        cells.append(line)
    return cells


def _against_the_paper(rows: Sequence[Row], variant: Variant) -> list[str]:
    """Differences from the right edit, seed by seed, and how often the covariance budget was not met."""
    right = {row.seed: row for row in rows if row.variant == PAPER}
    mine = [row for row in rows if row.variant == variant and row.seed in right]
    apart = (_signed([getattr(r, name) - getattr(right[r.seed], name) for r in mine]) for name in ("mse", "ks"))
    reached = [row.covariance_reached for row in mine if row.covariance_reached is not None]
    failed = sum(value < PAPER_REDUCTIONS[1] / 2 for value in reached)
    least = f", least {min(reached):.3g} times" if failed else ""
    return [" / ".join(apart), f"{failed} of {len(reached)}{least}"]


def _signed(values: Sequence[float]) -> str:
    """A difference, with one decimal more than what it is a difference of."""
    return Statistic.of(values).text(digits=4, signed=True)


def _goals(saved: Saved) -> list[list[str]]:
    """`transport` between what was there before and what it is to reach."""
    before = ("as trained", "refitted without parity")
    cells = [["", *before, "target KS", "`transport`", "KS, population", "goal", "excess", "target met"]]
    for name in _COMPARISONS:
        table, rows = saved[name]
        for line in table.shown():
            if line.variant.method != "transport":
                continue
            mse, ks = (s.text(digits=4, of_mean=line.seeds) for s in (line.mse, line.ks))
            square = float(np.mean([row.ks**2 - row.ks_floor**2 for row in rows if row.variant == line.variant]))
            asked = _GOALS.get(name) if line.variant.level == table.experiment.target_ks else None
            cells.append([
                name.replace("-", ", "),
                *(f"{table[v].mse.mean:.4f} / {table[v].ks.mean:.3f}" for v in (_UNTOUCHED, _REFITTED)),
                f"{line.variant.level:g}",
                f"{mse} / {ks}",
                f"{np.sqrt(max(square, 0.0)):.3f}",
                f"MSE ≤ {asked:g}" if asked else "",
                line.regret.text(digits=3, of_mean=line.seeds) if line.regret else "",
                f"{line.met or 0:.0%}",
            ])  # fmt: skip
    return cells


def _equal_ks(saved: Saved) -> list[list[str]]:
    cells = [["", "method", "KS", "MSE", "transport at the same KS: MSE", "difference"]]
    retrained = [Variant(method, level=LAW.target_ks) for method in ("finetuned", "from_scratch")]
    others = [PAPER, *(variant for variant in _PREDICTED if variant.fitted_on == "scores"), *retrained]
    for name in _COMPARISONS:
        rows = saved[name][1]
        for variant in others if rows else ():
            pairs = list(_beside_transport(rows, variant))
            theirs, ours = [row for row, _ in pairs], [mse for _, mse in pairs]
            columns = [row.ks for row in theirs], [row.mse for row in theirs], ours
            difference = _signed([mse - row.mse for row, mse in pairs])
            numbers = [str(Statistic.of(column)) for column in columns]
            cells.append([name.replace("-", ", "), describe(variant), *numbers, difference])
    return cells


def _beside_transport(rows: Sequence[Row], variant: Variant) -> Iterator[tuple[Row, float]]:
    """Rows of a method, and the MSE of transport on the same seed where its path has the same KS."""
    paths: dict[int, list[tuple[float, float]]] = {}
    for row in rows:
        if row.method == "transport":
            paths.setdefault(row.seed, []).append((row.ks, row.mse))
    for row in rows:
        if row.variant == variant and row.seed in paths:
            ks, mse = np.array(sorted(paths[row.seed])).T
            yield row, float(np.interp(row.ks, ks, np.minimum.accumulate(mse)))
