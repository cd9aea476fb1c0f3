"""Saved seeds: whole or absent, never of two protocols, the same bytes in whatever order they were made."""

import csv
import io
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from reproduction.config import LAW, PARTS, Training, Variant
from reproduction.datasets import Examples
from reproduction.runs import (
    Folder,
    Outcome,
    Row,
    from_csv,
    interpolated_regret,
    parse_seeds,
    to_csv,
    to_rows,
    with_regret,
    write_atomically,
)


def make_rows(seed: int, mse: float = 0.1) -> list[Row]:
    shared = {"experiment": "law", "preparation": "paper", "seed": seed, "evaluated_on": "test"}
    row = Row(
        **shared, method="transport", fitted_on="", group="none", level=0.1, mean_reduction=None,
        covariance_reduction=None, mse=mse + seed / 7, ks=1 / 3, ks_floor=0.05, mean_gap=0.2, variance_gap=0.01,
        met=True,
    )  # fmt: skip
    return [row, replace(row, method="parity", level=None, densities={"black": (1, 2, 3)})]


def test_a_saved_seed_comes_back(tmp_path):
    folder = Folder(tmp_path, LAW)
    folder.write("repaired", 33, make_rows(33))
    assert folder.read(33) == make_rows(33)
    assert folder.finished() == [33]


def test_the_parts_of_a_seed_are_joined_and_only_then_compared_with_the_optimum(tmp_path):
    (row, _), known = make_rows(33), {"untouched": 0.05, "constant": 0.15, "optimum": 0.06}
    rows = tuple(replace(row, method=method, mse=mse, level=None) for method, mse in known.items())
    folder = Folder(tmp_path, LAW)
    folder.write("repaired", 33, [replace(row, mse=0.07)])
    assert [row.regret for row in folder.read(33)] == [None]
    assert folder.missing(33) == ["references", "paper", "retrained"]
    folder.write("references", 33, rows)
    found = {row.method: row.regret for row in folder.read(33)}
    assert list(found) == ["untouched", "constant", "transport", "optimum"]
    assert found["transport"] == pytest.approx(0.1)
    assert found["optimum"] is None


def test_a_part_minds_only_what_decides_it(tmp_path):
    Folder(tmp_path, LAW).write("references", 33, make_rows(33))
    other = replace(LAW, target_ks=0.2)
    assert Folder(tmp_path, other).read(33) == make_rows(33)
    Folder(tmp_path, LAW).write("repaired", 33, make_rows(33))
    with pytest.raises(ValueError, match=r"another protocol \(target_ks: 0.1 there, 0.2 here\)"):
        Folder(tmp_path, other).read(33)


def test_rows_of_another_protocol_are_refused(tmp_path):
    Folder(tmp_path, LAW).write("repaired", 33, make_rows(33))
    quick = Folder(tmp_path, replace(LAW, training=Training(epochs=1)))
    with pytest.raises(ValueError, match=r"another protocol \(training\.epochs: 20 there, 1 here\)"):
        quick.read(33)


def test_printed_numbers_are_no_part_of_the_protocol(tmp_path):
    Folder(tmp_path, LAW).write("repaired", 33, make_rows(33))
    assert Folder(tmp_path, replace(LAW, printed=())).read(33) == make_rows(33)


def test_the_protocol_survives_json():
    for part in PARTS:
        assert json.loads(json.dumps(LAW.protocol(part))) == LAW.protocol(part)


@pytest.mark.parametrize("content", ["{", "[]", '{"format": "something else"}', "null"])
def test_a_file_that_is_no_saved_seed_is_named(tmp_path, content):
    folder = Folder(tmp_path, LAW)
    write_atomically(folder.path("repaired", 33), content)
    with pytest.raises(ValueError, match=r"seed-33\.json is not a saved seed.*delete it"):
        folder.read(33)


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    def broken(*_):
        raise OSError("no space left")

    folder = Folder(tmp_path, LAW)
    folder.write("repaired", 33, make_rows(33))
    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="no space"):
        folder.write("repaired", 33, make_rows(33, mse=9.0))
    assert [path.name for path in folder.path("repaired", 33).parent.iterdir()] == ["seed-33.json"]
    assert folder.read(33) == make_rows(33)


def test_what_a_killed_writer_left_is_not_taken_for_a_seed(tmp_path):
    folder = Folder(tmp_path, LAW)
    folder.write("repaired", 33, make_rows(33))
    folder.path("repaired", 33).with_name(".seed-34.json.0123abcd").write_text("{")
    folder.path("repaired", 33).with_name("seed-x.json").write_text("{")
    assert folder.finished() == [33]


def test_the_combined_file_does_not_depend_on_the_order_of_seeds(tmp_path):
    texts = []
    for name, seeds in (("a", (33, 34, 40)), ("b", (40, 33, 34))):
        folder = Folder(tmp_path / name, LAW)
        for seed in seeds:
            folder.write("repaired", seed, make_rows(seed))
        texts.append(folder.combine().read_bytes())
    assert texts[0] == texts[1]
    assert texts[0].count(b"\n") == 1 + 3 * 2


def test_runs_that_share_a_folder_end_with_all_rows(tmp_path):
    def one_run(seeds):
        folder = Folder(tmp_path / "shared", LAW)
        for seed in seeds:
            folder.write("repaired", seed, make_rows(seed))
        folder.combine()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one_run, [range(33, 48), range(40, 55), range(33, 40), range(50, 60)]))
    alone = Folder(tmp_path / "alone", LAW)
    for seed in range(33, 60):
        alone.write("repaired", seed, make_rows(seed))
    assert (tmp_path / "shared" / "law-paper.csv").read_bytes() == alone.combine().read_bytes()


def test_combining_again_when_another_run_finished_a_seed_meanwhile(tmp_path, monkeypatch):
    folder = Folder(tmp_path, LAW)
    folder.write("repaired", 33, make_rows(33))
    answers = iter([[33], [33, 34], [33, 34]])  # before the first writing, after it, after the second
    folder.write("repaired", 34, make_rows(34))
    monkeypatch.setattr(Folder, "finished", lambda _: next(answers))
    assert folder.combine().read_text().count("\n") == 1 + 2 * 2


def test_csv_gives_every_row_back(tmp_path):
    rows = [replace(make_rows(33)[0], mse=0.1 + 0.2), replace(make_rows(34)[1], densities={})]
    write_atomically(tmp_path / "rows.csv", to_csv(rows))
    assert from_csv(tmp_path / "rows.csv") == rows
    assert from_csv(tmp_path / "none.csv") == []


def test_csv_gives_every_float_back():
    row = replace(make_rows(33)[0], mse=0.1 + 0.2)
    (read,) = csv.DictReader(io.StringIO(to_csv([row])))
    assert float(read["mse"]) == row.mse
    assert float(read["ks"]) == row.ks
    assert read["covariance_reduction"] == ""
    assert read["met"] == "True"


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("33-35", (33, 34, 35)), ("33", (33,)), ("40, 33-34,33", (33, 34, 40)), ("33-33", (33,))],
)
def test_seeds(text, seeds):
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "a", "33-", "33--35", "-3", "3.5", "35-33", "33;34"])
def test_seeds_that_cannot_be_read(text):
    with pytest.raises(ValueError, match=r"seeds .*(write a range|backwards)"):
        parse_seeds(text)


def test_predictions_become_rows_and_densities():
    """Two groups of 50, 0.3 apart; the untouched network halves the error of a constant."""
    y = np.concatenate([np.linspace(0, 1, 50), np.linspace(0.3, 1.3, 50)])
    here = Examples(np.zeros((100, 1)), y, np.repeat(["a", "b"], 50).astype(object))
    constant, half = np.full(100, y.mean()), (y + y.mean()) / 2
    known = {"untouched": half, "constant": constant, "paper": 0.9 * half + 0.1 * constant, "optimum": half}
    outcomes = [Outcome(Variant(name), prediction, met=name == "paper") for name, prediction in known.items()]
    result = to_rows(outcomes, here, LAW, 33)
    rows = {row.method: row for row in with_regret(result)}
    assert rows["constant"].mse == pytest.approx(y.var())
    assert rows["untouched"].mse == pytest.approx(y.var() / 4)
    assert rows["untouched"].mean_gap == pytest.approx(0.15)
    assert rows["untouched"].ks == pytest.approx(0.3, abs=0.02)
    assert rows["untouched"].regret == pytest.approx(0.0)
    assert rows["constant"].regret == pytest.approx(1.0)
    assert rows["optimum"].regret is None
    assert rows["paper"].met
    assert (rows["paper"].seed, rows["paper"].experiment, rows["paper"].variant) == (33, "law", Variant("paper"))
    for row in result:
        assert {label: sum(counts) for label, counts in row.densities.items()} == {"a": 50, "b": 50}


def test_without_an_optimum_there_is_no_regret():
    here = Examples(np.zeros((4, 1)), np.arange(4.0), np.array(["a", "b", "a", "b"], dtype=object))
    (row,) = with_regret(to_rows([Outcome(Variant("paper"), here.y)], here, LAW, 33))
    assert row.regret is None


CURVE = {"curve_mse": np.array([0.30, 0.20, 0.10]), "curve_ks": np.array([0.1, 0.2, 0.4]), "gain": 0.5}


@pytest.mark.parametrize(
    ("mse", "ks", "regret"),
    [
        (0.20, 0.2, 0.0),  # on the curve
        (0.25, 0.15, 0.0),  # between two points
        (0.20, 0.3, 0.1),
        (0.35, 0.05, 0.1),  # fairer than the curve: measured at its fairest point
        (0.10, 0.9, 0.0),
    ],
)
def test_regret(mse, ks, regret):
    assert interpolated_regret(mse, ks, **CURVE) == pytest.approx(regret)


def test_a_curve_that_sampling_bent_does_not_flatter():
    bent = {"curve_mse": np.array([0.10, 0.20, 0.30]), "curve_ks": np.array([0.4, 0.3, 0.2])}
    assert interpolated_regret(0.2, 0.3, **bent, gain=1.0) == pytest.approx(0.0)
    worse = {"curve_mse": np.array([0.10, 0.50]), "curve_ks": np.array([0.1, 0.4])}
    assert interpolated_regret(0.2, 0.4, **worse, gain=1.0) == pytest.approx(0.1)
