"""What protection costs: repairs from moments of 1 to 20 sites, and what the attack reads from each site's file.

    ESVDFAIR_DATA=... python benchmarks/federated.py                  # law and COMPAS, seed 1: about ten minutes
    python benchmarks/federated.py compas --seeds 1-2 --sites 2,20

A network is trained as the paper does; its training rows are dealt out to the sites. Each way of collecting (unsafe,
the default, under masks, with noise) gives one repair by parity without any row ("blind") and one that validation rows
choose for KS 0.1; both are judged on the test split. The attack (benchmarks/attack.py) goes for every site's file,
under masks for the sum, which is all that anybody sees; people read are counted by comparing with the true rows.
"""

import argparse
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from attack import Found, attack, attack_together
from esvdfair import ESVDFairWarning, ks_distance
from esvdfair.experiments.config import Training
from esvdfair.experiments.network import Trained, load, predict, train
from esvdfair.experiments.runs import parse_seeds
from esvdfair.federated import SiteMoments, collect_moments, make_key, mask_moments, merge_moments, repair_from_moments
from esvdfair.models import adapt

EPSILONS = (1.0, 3.0, 10.0)
NOISY = tuple(f"epsilon {epsilon:g}" for epsilon in EPSILONS)
WAYS = ("unsafe", "default", "masked", *NOISY, *(f"masked, {way}" for way in NOISY))


HEADER = """
| sites | collected | units out / people withheld | blind, MSE / KS | target 0.1, MSE / KS | people read |
|---|---|---|---|---|---|"""


def dealt(trained: Trained, sites: int) -> list[np.ndarray]:
    """Which training rows each site has."""
    rows = len(trained.split.train.y)
    return np.array_split(np.random.default_rng(trained.seed).permutation(rows), sites)


def collected(trained: Trained, way: str, sites: int) -> list[SiteMoments]:
    """The moments of every site."""
    rows, shown = trained.split.train, trained.split.validation
    options: dict[str, object] = {"unsafe": True} if way == "unsafe" else {}
    if "epsilon" in way:
        options = {"epsilon": float(way.split()[-1]), "public": (shown.X, shown.y, shown.sensitive_features)}
        options["sharing"] = sites if "masked" in way else 1
    return [
        collect_moments(trained.network, rows.X[i], rows.y[i], sensitive_features=rows.sensitive_features[i], **options)
        for i in dealt(trained, sites)
    ]


def masked_sum(parts: list[SiteMoments]) -> SiteMoments:
    """The sum of all sites, by way of masked moments."""
    if len(parts) == 1:
        return parts[0]
    groups = sorted({label for part in parts for label in part.moments.labels})
    with TemporaryDirectory() as name:
        public = [make_key(Path(name) / str(i)) for i in range(len(parts))]
        keys = [path.with_suffix("") for path in public]
        return merge_moments(
            [mask_moments(part, keys[i], public[:i] + public[i + 1 :], groups=groups) for i, part in enumerate(parts)]
        )


def people_read(trained: Trained, parts: list[SiteMoments], sites: int) -> int:
    """People whose rows the attack reads from the moments; each part is of the rows of one site, or one of all."""
    rows = trained.split.train
    adapter = adapt(trained.network)
    layer = adapter.layers(rows.X)[-1]
    (h,) = (np.asarray(value.double()) for value in adapter.capture(rows.X, [layer.name])[0].values())
    groups = np.asarray(rows.sensitive_features)
    count = 0
    for part, index in zip(parts, dealt(trained, sites), strict=True):
        told = [unit for unit in range(h.shape[1]) if unit not in part.left_out]
        true = np.column_stack([h[index][:, told], rows.y[index]])
        labels, columns = part.moments.labels, [*told, h.shape[1]]
        with_groups = np.column_stack([*(groups[index] == label for label in labels), true])
        read = set(_columns(attack_together(part.moments), labels, columns).among(with_groups))
        for label, found in attack(part.moments).items():
            mine = np.flatnonzero(groups[index] == label)
            read.update(mine[_columns(found, (), columns).among(true[mine])])
        count += len(read)
    return count


def _columns(found: Found, labels: Sequence[object], columns: list[int]) -> Found:
    """What was read of the columns that are told of, those of the groups before them."""
    chosen = [*range(len(labels)), *(len(labels) + column for column in columns)]
    return Found(found.certain[:, chosen], found.guesses[:, chosen])


@dataclass(frozen=True)
class Row:
    """What one way of collecting gives: refused, or what was left out, both repairs on test rows, and people read."""

    sites: int
    way: str
    left_out: float = np.nan
    withheld: float = np.nan
    blind: tuple[float, float] = (np.nan, np.nan)
    judged: tuple[float, float] = (np.nan, np.nan)
    read: float = np.nan
    refused: int = 0

    def __str__(self) -> str:
        if self.refused:
            return f"| {self.sites} | {self.way} | refused ({self.refused}) | | | |"
        cells = [f"{error:.4f} / {ks:.3f}" for error, ks in (self.blind, self.judged)]
        out = f"{self.left_out:.0f} / {self.withheld:.0f}"
        return f"| {self.sites} | {self.way} | {out} | {' | '.join(cells)} | {self.read:.0f} |"


def measured(trained: Trained, sites: int, ways: Sequence[str]) -> Iterator[Row]:
    """One row of the table for each way of collecting."""
    test, shown = trained.split.test, trained.split.validation
    for way in ways:
        try:
            parts = collected(trained, way, sites)
        except ValueError:
            yield Row(sites, way, refused=1)
            continue
        whole = masked_sum(parts) if "masked" in way else merge_moments(parts)
        seen = [whole] if "masked" in way else parts
        figures = []
        for options in ({}, {"validation": shown, "target_ks": 0.1}):
            prediction = repair_from_moments(trained.network, whole, **options).predict(test.X)
            error = float(np.mean((prediction - test.y) ** 2))
            figures.append((error, ks_distance(prediction, sensitive_features=test.sensitive_features)))
        withheld = sum(site.withheld for part in parts for site in part.sites)
        yield Row(sites, way, len(whole.left_out), withheld, *figures, people_read(trained, seen, len(seen)))


def mean(rows: Sequence[Row]) -> Row:
    """The mean over seeds; refused where one was, with how many."""
    refused = sum(row.refused for row in rows)
    if refused:
        return replace(rows[0], refused=refused)
    numbers = {
        field.name: tuple(np.mean([getattr(row, field.name) for row in rows], axis=0).tolist())
        if isinstance(getattr(rows[0], field.name), tuple)
        else float(np.mean([getattr(row, field.name) for row in rows]))
        for field in fields(Row)
        if field.name not in ("sites", "way", "refused")
    }
    return replace(rows[0], **numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=["law", "compas"])
    parser.add_argument("--ways", type=lambda text: text.split(";"), default=WAYS, help="such as 'unsafe;default'")
    parser.add_argument("--seeds", type=parse_seeds, default=parse_seeds("1-1"))
    parser.add_argument("--sites", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 5, 20])
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", ESVDFairWarning)
    for name in arguments.names:
        found: dict[tuple[int, str], list[Row]] = {}
        for seed in arguments.seeds:
            trained = train(load(name, "paper"), Training(), seed)
            test, prediction = trained.split.test, predict(trained.network, trained.split.test.X)
            error, ks = (
                np.mean((prediction - test.y) ** 2),
                ks_distance(prediction, sensitive_features=test.sensitive_features),
            )
            print(f"\n{name}, seed {seed}: {len(trained.split.train.y):,} rows; untouched {error:.4f} / {ks:.3f}")
            print(HEADER)
            for sites in arguments.sites:
                for row in measured(trained, sites, arguments.ways):
                    found.setdefault((row.sites, row.way), []).append(row)
                    print(row, flush=True)
        print(
            f"\n{name}, mean of {len(arguments.seeds)} seeds\n{HEADER}",
            *map(mean, found.values()),
            sep="\n",
            flush=True,
        )


if __name__ == "__main__":
    main()
