"""From rows to lines: means, deviations, and whether they agree with the paper."""

import json
from dataclasses import replace

import pytest

from reproduction.config import COMPAS, EXPERIMENTS, LAW, OF_THE_PAPER, PAPER, Variant
from reproduction.runs import Row
from reproduction.tables import Statistic, Table, describe, text_width


def make_row(variant: Variant, *, seed: int = 33, mse: float = 0.055, ks: float = 0.376, **more) -> Row:
    what = {name: getattr(variant, name) for name in Variant.__dataclass_fields__}
    shared = {"experiment": "law", "preparation": "paper", "evaluated_on": "test"}
    return Row(
        **{**shared, "seed": seed, "mse": mse, "ks": ks, "ks_floor": 0.06, "mean_gap": 0.1, "variance_gap": 0.0}
        | what
        | more
    )


UNTOUCHED = Variant("untouched")


def test_mean_and_sample_deviation():
    statistic = Statistic.of([1.0, 2.0, 4.0])
    assert statistic.mean == pytest.approx(7 / 3)
    assert statistic.sd == pytest.approx((7 / 3) ** 0.5)
    assert str(Statistic.of([0.5])) == "0.500"
    assert str(Statistic.of([0.5, 0.7])) == "0.600 ± 0.141"


@pytest.mark.parametrize(
    ("mse", "ks", "agrees"),
    [
        (0.055, 0.376, True),
        (0.061, 0.345, True),  # one printed standard deviation is still within
        (0.0614, 0.376, True),  # to the printed decimals
        (0.062, 0.376, False),
        (0.055, 0.344, False),
    ],
)
def test_agreement_is_within_one_printed_deviation_in_both_columns(mse, ks, agrees):
    (line,) = Table([make_row(UNTOUCHED, mse=mse, ks=ks)], LAW).lines
    assert line.agrees is agrees


def test_the_clean_preparation_has_nothing_to_agree_with():
    (line,) = Table([make_row(UNTOUCHED, preparation="clean")], replace(LAW, preparation="clean")).lines
    assert line.printed is None
    assert line.agrees is None


def test_lines_average_over_seeds():
    rows = [make_row(PAPER, seed=s, mse=m, regret=r) for s, m, r in ((33, 0.08, 0.1), (34, 0.10, None))]
    (line,) = Table(rows, LAW).lines
    assert line.seeds == 2
    assert line.mse.mean == pytest.approx(0.09)
    assert line.regret == Statistic(0.1, None)


def test_a_line_with_fewer_seeds_than_its_table_says_so():
    table = Table([make_row(UNTOUCHED), make_row(UNTOUCHED, seed=34), make_row(PAPER)], LAW)
    for text in (str(table), table.to_markdown()):
        assert "c̃_v 150 (1 of 2 seeds)" in text
        assert text.count("seeds)") == 1
    assert table.extent == "up to 2 seeds, test rows"


def test_a_table_shows_some_points_of_the_curves():
    variants = [UNTOUCHED, *(Variant(m, level=x) for m in ("transport", "optimum") for x in (0.05, 0.10, 0.20))]
    table = Table([make_row(v) for v in variants], LAW)
    kept = [(line.variant.method, line.variant.level) for line in table.shown()]
    assert kept == [("untouched", None), ("transport", 0.10), ("optimum", 0.05), ("optimum", 0.10)]


def test_columns_of_the_printed_table_line_up():
    table = Table([make_row(UNTOUCHED), make_row(PAPER)], LAW)
    title, _, header, *rest = str(table).split("\n")
    assert title == "law, preparation paper, 1 seed, test rows"
    assert "c̃_e 15" in rest[1]
    assert len({text_width(row[: row.index("0.055")]) for row in rest} | {header.index("MSE")}) == 1
    assert table.to_markdown().count("\n") == 3


def test_the_distance_to_an_estimate_is_not_called_regret():
    table = Table([make_row(PAPER, regret=0.4)], LAW)
    for text in (str(table), table.to_markdown()):
        assert "excess over the plug-in optimum" in text
        assert "regret" not in text
    assert table.to_dict()["lines"][0]["regret"] == {"mean": 0.4, "sd": None}  # machines know it by its old name


def test_a_table_for_machines_is_plain_json():
    table = Table([make_row(UNTOUCHED)], LAW)
    (line,) = json.loads(json.dumps(table.to_dict()))["lines"]
    assert line["method"] == "untouched"
    assert line["mse"] == {"mean": 0.055, "sd": None}
    assert line["printed"]["mse"] == 0.055


def test_every_printed_row_has_a_name_of_its_own():
    for experiment in map(EXPERIMENTS.get, OF_THE_PAPER):
        names = [describe(printed.variant) for printed in experiment.printed]
        assert len(set(names)) == len(names) > 0


def test_the_papers_experiments_are_the_papers():
    assert OF_THE_PAPER == ("law", "compas", "ablation-mean", "ablation-covariance")
    for experiment in map(EXPERIMENTS.get, OF_THE_PAPER[2:]):
        printed = {(p.variant.mean_reduction, p.variant.covariance_reduction) for p in experiment.printed}
        assert printed == set(experiment.reductions)
        assert experiment.evaluated_on == "heldout"
    assert COMPAS.training == LAW.training == replace(LAW.training, epochs=20, width=256, depth=5)
