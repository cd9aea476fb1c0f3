"""README.md of this folder from tables of rows: every number comes from a run or is printed in the paper.

The words are in template.md; the figures that README.md shows are in results/.
"""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from esvdfair.core.edits import PAPER_REDUCTIONS
from reproduction import config
from reproduction.config import PAPER, Variant
from reproduction.runs import Row, from_csv, to_csv, with_regret, write_atomically
from reproduction.tables import Statistic, Table, describe, draw_figures, markdown

_TABLES = (
    config.LAW,
    config.COMPAS,
    replace(config.LAW, preparation="clean"),
    replace(config.COMPAS, preparation="clean"),
    config.ABLATION_MEAN,
    config.ABLATION_COVARIANCE,
)
# The error that `transport` is to reach on the test rows when KS ≤ 0.10 is asked for, with the paper's preparation.
_GOALS = {"law-paper": 0.0555, "compas-paper": 0.1985}

_UNTOUCHED = Variant("untouched")
_ON_TARGETS, _ON_SCORES = (
    [Variant(method, on, "predicted") for method in ("barycenter", "private_histogram")] for on in ("targets", "scores")
)
_PRINTED_CUBIC, _UNGUARDED, _ALGORITHM_2 = (
    Variant.reduced(name, *PAPER_REDUCTIONS) for name in ("paper_printed_cubic", "paper_unguarded_solve", "algorithm_2")
)


def render_report(out: Path, seeds: Sequence[int]) -> str:
    """The document as Markdown, from the tables ``law-paper.csv``, … in the folder ``out``.

    A file note.txt there, which may say what made the rows, stands at its head.
    """
    saved = {
        e.full_name: Table([row for row in from_csv(out / f"{e.full_name}.csv") if row.seed in seeds], e)
        for e in _TABLES
    }
    law, compas = saved["law-paper"], saved["compas-paper"]
    if not law.rows or not compas.rows:
        raise ValueError(f"{out} holds no finished seed of law and compas; run `python -m reproduction all` first.")
    comparisons = [table for table in saved.values() if table.experiment.is_comparison]
    note = out / "note.txt"
    parts = {
        **{name: _section(table) for name, table in saved.items()},
        "note": note.read_text(encoding="utf-8").strip() if note.exists() else "",
        "extent": _extent(list(saved.values())),
        "differences": _differences(law, compas),
        "errata": markdown(_errata(law, compas)),
        "goals": markdown(_goals(comparisons)),
        "equal-ks": markdown(_equal_ks(comparisons)),
    }
    text = Path(__file__).with_name("template.md").read_text("utf-8").format_map(parts)
    return text.replace("\n\n\n\n", "\n\n")


def join(out: Path, onto: Path) -> None:
    """Put the tables of a run into the folder of another: rows of the same seed and method are replaced.

    Their trade-offs are drawn anew; densities, which tables do not hold, come from a run of all methods alone.
    """
    for experiment in _TABLES:
        name = experiment.full_name
        ours = from_csv(out / f"{name}.csv")
        if not ours:
            continue
        rows = {(row.seed, row.variant): row for row in [*from_csv(onto / f"{name}.csv"), *ours]}
        by_seed: dict[int, list[Row]] = {}
        for row in rows.values():
            by_seed.setdefault(row.seed, []).append(row)
        joined = [row for seed in sorted(by_seed) for row in with_regret(by_seed[seed])]
        write_atomically(onto / f"{name}.csv", to_csv(joined))
        draw_figures(Table(joined, experiment), onto)
        if {row.variant for row in ours} == {row.variant for row in joined}:
            shutil.copy(out / "figures" / f"{name}-densities.png", onto)


def _extent(tables: Sequence[Table]) -> str:
    counts, seeds = {line.seeds for table in tables for line in table.lines}, tables[0].seeds
    exact = f"{len(seeds)} seeds ({seeds[0]}–{seeds[-1]})"
    if len(counts) == 1:
        return f"Each table is over {exact}."
    return f"The first table is over {exact}; others, and lines that have fewer, say their own."


def _section(table: Table) -> str:
    if not table.rows:
        return f"### {table.experiment.name}\n\nNo seed is saved."
    title = f"{table.experiment.name}, {table.extent}"
    said = [
        f"### {title}",
        table.to_markdown(),
        f"![{title}: error over KS](results/{table.experiment.full_name}-tradeoff.png)",
        f"![{title}: densities](results/{table.experiment.full_name}-densities.png)",
    ]
    if not table.experiment.is_comparison:
        errors, distances = [line.mse.mean for line in table.lines], [line.ks.mean for line in table.lines]
        monotone = errors == sorted(errors) and distances == sorted(distances, reverse=True)
        said.append(
            f"{'The error rises and KS falls' if monotone else 'The means are not monotone'} along the parameter."
        )
    return "\n\n".join(said)


def _differences(*tables: Table) -> str:
    found = [
        f"- {table.experiment.name}, {describe(line.variant)}: ours {line.mse} / {line.ks}, "
        f"printed {line.printed.mse:.3f} / {line.printed.ks:.3f}."
        for table in tables
        for line in table.lines
        if line.printed is not None and not line.agrees
    ]
    if not found:
        return "Every printed row is reproduced within one printed standard deviation."
    return "\n".join(["What differs:", "", *found])


def _errata(law: Table, compas: Table) -> list[list[str]]:
    """What every slip of the paper does to law and COMPAS."""
    cells = [["", *(f"{data}: {what}" for data in ("law", "COMPAS") for what in ("MSE", "KS", "differs by", "missed"))]]
    baselines = (variant for pair in zip(_ON_TARGETS, _ON_SCORES, strict=True) for variant in pair)
    for variant in (_UNTOUCHED, PAPER, _PRINTED_CUBIC, _UNGUARDED, _ALGORITHM_2, *baselines):
        line = [describe(variant)]
        for table in (law, compas):
            compared = variant in (_PRINTED_CUBIC, _UNGUARDED)
            beside = _against_the_paper(table.rows, variant) if compared else ["", ""]
            line += [str(table[variant].mse), str(table[variant].ks), *beside]
        cells.append(line)
    return cells


def _against_the_paper(rows: Sequence[Row], variant: Variant) -> list[str]:
    """Differences from the right edit, seed by seed, and how often the covariance budget was not met."""
    right = {row.seed: row for row in rows if row.variant == PAPER}
    mine = [row for row in rows if row.variant == variant and row.seed in right]
    pairs = ((row.mse - right[row.seed].mse, row.ks - right[row.seed].ks) for row in mine)
    apart = (Statistic.of(column).text(digits=4, signed=True) for column in zip(*pairs, strict=True))
    reached = [row.covariance_reached for row in mine if row.covariance_reached is not None]
    failed = sum(value < PAPER_REDUCTIONS[1] / 2 for value in reached)
    least = f", least {min(reached):.3g} times" if failed else ""
    return [" / ".join(apart), f"{failed} of {len(reached)}{least}"]


def _goals(comparisons: Sequence[Table]) -> list[list[str]]:
    """`transport` between what was there before and what it is to reach."""
    before = ("as trained", "refitted without parity")
    cells = [["", *before, "target KS", "`transport`", "KS, population", "goal", "excess", "target met"]]
    for table in comparisons:
        for line in (line for line in table.shown() if line.variant.method == "transport"):
            mse, ks = (s.text(digits=4, of_mean=line.seeds) for s in (line.mse, line.ks))
            square = float(np.mean([row.ks**2 - row.ks_floor**2 for row in table.rows if row.variant == line.variant]))
            asked = _GOALS.get(table.experiment.full_name) if line.variant.level == table.experiment.target_ks else None
            cells.append([
                table.experiment.full_name.replace("-", ", "),
                *(f"{table[v].mse.mean:.4f} / {table[v].ks.mean:.3f}" for v in (_UNTOUCHED, Variant("refitted"))),
                f"{line.variant.level:g}",
                f"{mse} / {ks}",
                f"{np.sqrt(max(square, 0.0)):.3f}",
                f"MSE ≤ {asked:g}" if asked else "",
                line.regret.text(digits=3, of_mean=line.seeds) if line.regret else "",
                f"{line.met or 0:.0%}",
            ])  # fmt: skip
    return cells


def _equal_ks(comparisons: Sequence[Table]) -> list[list[str]]:
    """Other methods beside `transport` where its path has the same KS, seed by seed."""
    cells = [["", "method", "KS", "MSE", "transport at the same KS: MSE", "difference"]]
    retrained = (Variant(method, level=config.LAW.target_ks) for method in ("finetuned", "from_scratch"))
    others = [PAPER, *_ON_SCORES, *retrained]
    for table in comparisons:
        seen = {row.variant for row in table.rows}
        for variant in (variant for variant in others if variant in seen):
            pairs = list(_beside_transport(table.rows, variant))
            columns = zip(*((row.ks, row.mse, ours, ours - row.mse) for row, ours in pairs), strict=True)
            *numbers, difference = map(Statistic.of, columns)
            line = [*map(str, numbers), difference.text(digits=4, signed=True)]
            cells.append([table.experiment.full_name.replace("-", ", "), describe(variant), *line])
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
