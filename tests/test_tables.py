"""A file read in pieces is the same table as the file read at once."""

import os
import subprocess
import sys
import threading
import warnings
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPRegressor

from esvdfair import Effort, ESVDFair
from esvdfair import table_files as files
from esvdfair import tables as table_module
from esvdfair.batches import row_key
from esvdfair.tables import Roles, TableBatches

FEATURES = ["a", "b", "c", "n"]


@pytest.fixture
def small_chunks(monkeypatch):
    """A few rows of a file are read at a time, of which only the first are kept."""
    monkeypatch.setattr(files, "CHUNK_ROWS", 50)
    monkeypatch.setattr(table_module, "HELD_BYTES", -1)


def people(rows=500, seed=0):
    rng = np.random.default_rng(seed)
    sex = np.where(rng.random(rows) < 0.4, "f", "m")
    x = rng.normal(size=(rows, 3)) + np.where(sex == "m", 0.8, 0.0)[:, None]
    table = pd.DataFrame(x, columns=["a", "b", "c"]).assign(n=rng.integers(0, 9, rows), sex=sex)
    return table.assign(y=x.sum(axis=1) + rng.normal(size=rows))


def save(table, folder, kind="csv"):
    path = folder / f"table.{kind}"
    if kind == "csv":
        table.to_csv(path, index=False)
    else:
        table.to_parquet(path, row_group_size=40)
    return path


def joined(table):
    """All batches, one below the other: inputs, labels, names of groups, row ids."""
    parts = list(table)
    return SimpleNamespace(
        x=pd.concat([batch.x for batch in parts]),
        y=np.concatenate([batch.y for batch in parts]),
        groups=[batch.labels[code] for batch in parts for code in batch.codes],
        row_id=np.concatenate([batch.row_id for batch in parts]),
        sizes=[len(batch.codes) for batch in parts],
    )


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_batches_hold_the_rows_of_the_file_in_order_and_can_be_read_again(small_chunks, tmp_path, kind):
    path = save(people(), tmp_path, kind)
    data = getattr(pd, f"read_{kind}")(path)
    table = TableBatches(path, Roles(("sex",), "y"), batch_rows=4)
    assert (table.scan.rows, table.scan.labels) == (500, ("f", "m"))
    assert table.scan.sizes == tuple(data["sex"].value_counts().sort_index())
    for _ in range(2):
        found = joined(table)
        pd.testing.assert_frame_equal(found.x, data[FEATURES], check_index_type=False)
        np.testing.assert_array_equal(found.y, data["y"])
        assert found.groups == list(data["sex"])
        np.testing.assert_array_equal(found.row_id, np.arange(500))
        assert found.row_id.dtype == np.uint64
        assert max(found.sizes) <= 4


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_dropped_rows_leave_gaps_in_the_row_ids(small_chunks, tmp_path, kind):
    data = people(120)
    data.loc[[0, 5, 6, 50], "a"] = np.nan
    data.loc[[6, 119], "sex"] = None
    data.loc[10:60, "b"] = np.nan  # whole chunks of it
    whole = data.notna().all(axis=1)
    path = save(data, tmp_path, kind)
    table = TableBatches(path, Roles(("sex",), "y"), drop_missing=True)
    found = joined(table)
    np.testing.assert_array_equal(found.row_id, np.flatnonzero(whole))
    np.testing.assert_array_equal(found.x, getattr(pd, f"read_{kind}")(path).loc[whole, FEATURES])
    assert (table.scan.total, table.scan.dropped) == (120, (~whole).sum())
    with pytest.raises(ValueError, match=rf"missing values in {(~whole).sum()} of 120 rows \('b' 51, 'a' 4, 'sex' 2\)"):
        TableBatches(save(data, tmp_path, kind), Roles(("sex",), "y"))


@pytest.mark.parametrize("held", [-1, 10**9])
@pytest.mark.parametrize(
    ("early", "late", "expected"),
    [
        ("1", "2.0", np.float64),  # whole numbers that turn out to be fractions
        ("1", "", np.float64),  # or to be missing
        ("007", "x", "text"),  # numbers that turn out to be text keep their zeros
        ("True", "1", "text"),
        ("True", "False", np.bool_),
        ("", "3", np.float64),
        ("inf", "none at all", "text"),
    ],
)
def test_the_type_of_a_column_is_that_of_the_whole_file(
    small_chunks, monkeypatch, tmp_path, early, late, expected, held
):
    monkeypatch.setattr(table_module, "HELD_BYTES", held)
    path = tmp_path / "odd.csv"
    lines = [f"{value},{sex}" for value in [early] * 200 + [late] * 200 for sex in "fm"]
    path.write_text("\n".join(["a,sex", *lines]) + "\n")
    oracle = pd.read_csv(path, low_memory=False).dropna()
    table = TableBatches(path, Roles(("sex",)), drop_missing=True)
    found = pd.concat([batch.x for batch in table])
    assert list(found["a"]) == list(oracle["a"])
    kinds = {batch.x["a"].dtype for batch in table} | {table.scan.head["a"].dtype}
    assert len(kinds) == 1
    if expected == "text":
        assert pd.api.types.is_string_dtype(kinds.pop())
    else:
        assert kinds == {np.dtype(expected)}


@pytest.mark.parametrize(
    ("early", "late", "labels"),
    [
        (["0", "1"], ["0.0", "1.0"], (0, 1)),  # one group, however it is written
        (["0", "1"], ["", "1"], (0, 1, "missing")),
        (["0", "1"], ["x", "1"], ("0", "1", "x")),
        (["True", "False"], ["", "True"], (False, True, "missing")),
        (["0.5", "0.25"], ["x", "0.5"], ("0.25", "0.5", "x")),  # text, so not continuous
    ],
)
def test_groups_are_those_of_the_whole_file(small_chunks, tmp_path, early, late, labels):
    path = tmp_path / "odd.csv"
    path.write_text("\n".join(["a,g", *(f"1.5,{g}" for g in early * 100 + late * 100)]) + "\n")
    table = TableBatches(path, Roles(("g",)), missing_group=True)
    assert table.scan.labels == labels
    assert {batch.labels[code] for batch in table for code in batch.codes} == set(labels)
    assert sum(table.scan.sizes) == 400


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("1,2,3,oops,f", "line 302 has 5 fields, more than the header has names \\(4\\)"),
        ("1,2,x,f", "the target, is not numeric, for example 'x'"),
        ("1,inf,3,f", "'b' of .* holds 1 infinite"),
        ("1,,3,f", r"missing values in 1 of 601 rows \('b' 1\)"),
        ("1,\xff,3,f", "not text in UTF-8"),
    ],
)
def test_what_is_wrong_far_into_the_file_is_found(small_chunks, tmp_path, line, said):
    path = tmp_path / "odd.csv"
    lines = [f"{i},{i / 7},{i},{'fm'[i % 2]}" for i in range(600)]
    path.write_bytes("\n".join(["a,b,y,sex", *lines[:300], line, *lines[300:]]).encode("latin-1"))
    with pytest.raises(ValueError, match=said):
        TableBatches(path, Roles(("sex",), "y"))


@pytest.mark.parametrize("sep", ["\n", "\r"])
@pytest.mark.parametrize("fields", [4, 6])
def test_a_field_too_many_is_found_wherever_the_row_stands(small_chunks, tmp_path, sep, fields):
    """pandas cuts such a row short where it is the first of those that are read at a time."""
    path = tmp_path / "odd.csv"
    for line in range(2, 20):
        rows = ["1,2,f"] * 20
        rows.insert(line - 2, ",".join(["1,2,m", *"456"])[: 2 * fields - 1])
        path.write_text(sep.join(["a,b,sex", *rows]), newline="")
        said = rf"cannot be read as a table: line {line} has {fields} fields, more than the header has names \(3\)"
        with pytest.raises(ValueError, match=said):
            TableBatches(path, Roles(("sex",)))


def test_a_quotation_mark_that_is_never_closed(small_chunks, monkeypatch, tmp_path):
    path = tmp_path / "odd.csv"
    path.write_text("a,sex\n" + "1,f\n" * 50 + '"2,m\n' + "1,f\n" * 9000)
    with pytest.raises(ValueError, match="EOF inside string starting at row 51"):
        TableBatches(path, Roles(("sex",)))
    monkeypatch.setattr(files, "UNFINISHED", 20_000)
    with pytest.raises(ValueError, match=r"goes on for more than .* mark may not be closed"):
        TableBatches(path, Roles(("sex",)))


def test_sensitive_columns_of_too_many_values(small_chunks, monkeypatch, tmp_path):
    monkeypatch.setattr(table_module, "MAX_GROUPS", 299)
    table = people(300).assign(name=[f"p{i}" for i in range(300)])
    path = save(table, tmp_path)
    with pytest.raises(ValueError, match="the sensitive column 'name' makes more than 299 groups"):
        TableBatches(path, Roles(("name",), "y"))
    with pytest.raises(ValueError, match="the sensitive column 'a' contains the fractional value"):
        TableBatches(path, Roles(("a",), "y"))


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("seed", range(3))
def test_records_end_where_pandas_says(small_chunks, tmp_path, end, seed):
    """Fields with line ends, doubled marks and stray marks; the parser of the whole file is the oracle."""
    odd = ["plain", '"with, comma"', '"two\nlines"', '"say ""hi"""', '5" pipe', 'a"b"', '""', '"q"r', "é"]
    rng = np.random.default_rng(seed)
    lines = [f"{i},{rng.choice(odd)},{'fm'[i % 2]}" for i in range(300)]
    path = tmp_path / "odd.csv"
    path.write_text(end.join(['n,"two\nlines",sex', *lines]), newline="")
    oracle = pd.read_csv(path, low_memory=False, keep_default_na=True).fillna("")
    table = TableBatches(path, Roles(("sex",)), drop_missing=True)
    found = pd.concat([batch.x for batch in table])
    kept = oracle[oracle["two\nlines"] != ""]
    assert list(found["n"]) == list(kept["n"])
    assert list(found["two\nlines"]) == list(kept["two\nlines"])


@pytest.fixture(scope="module")
def network():
    data = people(400, seed=9)
    model = MLPRegressor(hidden_layer_sizes=(6, 5), max_iter=60, solver="lbfgs", random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # good enough to be repaired
        return model.fit(data[FEATURES], data["y"])


def from_memory_and_file(network, method, path, data):
    """The same repair from rows in memory and from a file."""
    options = {"max_mse_increase": 2.0} if method == "transport" else {}  # only a constant closes this gap
    held, streamed = (
        ESVDFair(network, method=method, random_state=3, effort=Effort.quick(), **options) for _ in range(2)
    )
    held.fit(data[FEATURES], data["y"], sensitive_features=data["sex"])
    return held, streamed.fit(TableBatches(path, Roles(("sex",), "y")))


# Transport sorts rows into bins again and again, which makes much of the last digits of a sum: on this table 3e-4 of
# the error and 1 % of the weights.
@pytest.mark.filterwarnings("ignore:The repaired model (predicts no better than a constant|is worse than the original)")
@pytest.mark.parametrize(
    ("method", "error", "weights"),
    [("transport", 1e-3, 0.03), ("parity", 1e-5, 1e-5), ("exact", 1e-5, 1e-5), ("paper", 1e-5, 1e-5)],
)
def test_a_repair_in_pieces_is_that_from_memory(small_chunks, tmp_path, network, method, error, weights):
    """Same held-out rows, same samples: only sums are taken in another order."""
    data = people(800)
    held, streamed = from_memory_and_file(network, method, save(data, tmp_path), data)
    assert streamed.summary_["group_sizes"] == held.summary_["group_sizes"]
    for name in ("ks_before", "mse_before", "mean_gap_before"):
        assert streamed.summary_[name] == pytest.approx(held.summary_[name], rel=1e-9), name
    for name in ("ks_after", "mse_after"):
        assert streamed.summary_[name] == pytest.approx(held.summary_[name], rel=error), name
    for old, new in zip(held.edits_, streamed.edits_, strict=True):
        assert np.linalg.norm(new.weight_after - old.weight_after) < weights * np.linalg.norm(old.weight_after)


# --- samples -------------------------------------------------------------------------------------------------------


def test_a_sample_is_by_the_hash_of_the_row_and_does_not_depend_on_the_chunks(small_chunks, monkeypatch, tmp_path):
    monkeypatch.setattr(table_module, "RARE_ROWS", 10)
    data = people(3000)
    path = save(data, tmp_path)
    table = TableBatches(path, Roles(("sex",), "y"))
    part = table.sample(600, seed=4)
    assert 500 < len(part) < 700
    assert (part.X.index == part.groups.index).all()
    pd.testing.assert_frame_equal(part.X, data.loc[part.X.index, FEATURES])
    assert list(part.X.index) == list(np.flatnonzero(row_key(np.arange(3000), 4 + table_module._SAMPLE) < 0.2))
    monkeypatch.setattr(files, "CHUNK_ROWS", 500)
    monkeypatch.setattr(table_module, "HELD_BYTES", 10**9)
    again = TableBatches(path, Roles(("sex",), "y")).sample(600, seed=4)
    assert list(again.X.index) == list(part.X.index)
    assert list(table.sample(600, seed=5).X.index) != list(part.X.index)
    assert len(table.sample(5000)) == len(table.sample()) == 3000


def test_a_rare_group_is_in_every_sample(small_chunks, monkeypatch, tmp_path):
    monkeypatch.setattr(table_module, "RARE_ROWS", 50)
    data = people(3000)
    data.loc[[7, 1000, 2900], "sex"] = "x"
    part = TableBatches(save(data, tmp_path), Roles(("sex",), "y")).sample(300)
    assert part.groups["sex"].value_counts()["x"] == 3
    assert 250 < len(part) < 360


# --- memory ------------------------------------------------------------------------------------------------------


def test_progress_is_told_in_bytes(small_chunks, tmp_path):
    path = save(people(), tmp_path)
    told = []
    table = TableBatches(path, Roles(("sex",), "y"), progress=lambda done, size: told.append((done, size)))
    size = path.stat().st_size
    assert told[-1] == (size, size)
    told.clear()
    assert sum(len(batch.codes) for batch in table) == 500
    assert told[0] == (0, size)
    assert told == sorted(told)
    assert told[-1] == (size, size)


def test_a_pass_over_a_large_file_parses_it_once(small_chunks, monkeypatch, tmp_path):
    """With the scan, a repair parses every row twice."""
    table, passes = TableBatches(save(people(), tmp_path), Roles(("sex",), "y")), []
    frames = files.CsvFile.frames

    def count(*given, **options):
        passes.append(1)
        return frames(*given, **options)

    monkeypatch.setattr(files.CsvFile, "frames", count)
    assert sum(len(batch.codes) for batch in table) == 500
    assert passes == [1]


def test_a_file_that_changes_between_passes(small_chunks, tmp_path):
    path = save(people(), tmp_path)
    table = TableBatches(path, Roles(("sex",), "y"))
    save(people(400, seed=1), tmp_path)
    with pytest.raises(ValueError, match="has changed since it was first read"):
        list(table)


def test_what_comes_through_a_pipe_can_be_read_again(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    text = people(100).to_csv(index=False)
    writer = threading.Thread(target=pipe.write_text, args=(text,))
    writer.start()
    table = TableBatches(pipe, Roles(("sex",), "y"))
    writer.join()
    assert sum(len(batch.codes) for batch in table) == 100
    assert table.path == pipe


PEAK = r"""
import re, sys
from pathlib import Path
import pyarrow.parquet
from esvdfair import table_files as files, tables as module
from esvdfair.tables import Roles, TableBatches
peak = lambda: int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024  # no parent's peak
module.HELD_BYTES, files.CHUNK_ROWS = 0, 2**13
for path in sys.argv[1:]:
    table = TableBatches(path, Roles(("g",), "y"))
    print(sum(len(batch.codes) for batch in table), peak())
"""


@pytest.mark.parametrize(("kind", "rows"), [("csv", 120_000), ("parquet", 240_000)])
def test_memory_does_not_grow_with_the_file(tmp_path, kind, rows):
    """A file four times as large needs the same memory, far less than its values take."""
    paths = [tmp_path / f"{size}.{kind}" for size in (rows // 4, rows)]
    values = [write_numbers(path, size, columns=30) for path, size in zip(paths, (rows // 4, rows), strict=True)]
    done = subprocess.run([sys.executable, "-c", PEAK, *paths], capture_output=True, check=True)
    some, peak_of_some, all_rows, peak_of_all = map(int, done.stdout.split())
    assert (some, all_rows) == (rows // 4, rows)
    assert peak_of_all < 1.2 * peak_of_some
    assert peak_of_all - peak_of_some < values[1] / 2


def write_numbers(path, rows, columns):
    """A table of so many rows, written in pieces; gives the bytes of its values."""
    rng = np.random.default_rng(0)
    piece = pa.table(
        {f"x{i}": rng.normal(size=10_000) for i in range(columns)}
        | {"y": rng.normal(size=10_000), "g": rng.integers(0, 2, 10_000)}
    )
    with path.open("wb") as file:
        make = pyarrow.csv.CSVWriter if path.suffix == ".csv" else pyarrow.parquet.ParquetWriter
        with make(file, piece.schema) as writer:
            for _ in range(rows // len(piece)):
                writer.write_table(piece)
    return rows * (columns + 2) * 8


def test_strata_of_a_file_are_those_of_its_rows(tmp_path):
    frame = pd.DataFrame({"x": [1.0, 2, 3, 4], "job": ["a", "b", "a", "b"], "sex": [0, 1, 1, 0], "y": [1.0, 2, 3, 4]})
    frame.to_csv(tmp_path / "people.csv", index=False)
    table = TableBatches(tmp_path / "people.csv", Roles(("sex",), "y", features=("x",), control=("job",)), batch_rows=3)
    found = [(batch.labels[code], batch.group_parts) for batch in table for code in batch.codes]
    assert found == [((0, "a"), 1), ((1, "b"), 1), ((1, "a"), 1), ((0, "b"), 1)]
    assert table.sample().control.job.tolist() == ["a", "b", "a", "b"]


def test_a_control_is_neither_the_group_nor_the_label(tmp_path):
    pd.DataFrame({"x": [1.0, 2], "sex": [0, 1], "y": [1.0, 2]}).to_csv(tmp_path / "people.csv", index=False)
    with pytest.raises(ValueError, match=r"column .sex. has another role already"):
        TableBatches(tmp_path / "people.csv", Roles(("sex",), "y", control=("sex",)))


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_parquet_inputs_are_read_once_and_nan_in_them_is_still_found(small_chunks, tmp_path, wrong):
    """The first pass reads groups and labels where the file says that nothing is missing."""
    data = people()
    table = TableBatches(save(data, tmp_path, "parquet"), Roles(("sex",), "y"))
    assert not table.scan.inputs_read
    np.testing.assert_array_equal(joined(table).x[FEATURES], data[FEATURES])
    values = pa.table(data.reset_index(drop=True))
    place = values.column_names.index("b")
    column = np.where(np.arange(len(data)) == 400, wrong, data["b"].to_numpy())
    pa.parquet.write_table(values.set_column(place, "b", pa.array(column, from_pandas=False)), tmp_path / "nan.parquet")
    table = TableBatches(tmp_path / "nan.parquet", Roles(("sex",), "y"))
    with pytest.raises(ValueError, match="has NaN or infinite values in 'b'; correct those rows"):
        list(table)
