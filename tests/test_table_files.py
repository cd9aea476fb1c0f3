import gzip
import hashlib
import re
import subprocess
import sys
import zipfile
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from esvdfair import ESVDFairWarning
from esvdfair.table_files import open_table
from esvdfair.tables import Roles, TableBatches

TABLE = pd.DataFrame({"a": [1.0, 2.0, 3.0, 4.0], "b": [0, 1, 0, 1], "y": [0.5, 1.5, 2.5, 3.5], "sex": list("fmfm")})


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "table.csv"
    TABLE.to_csv(file, index=False)
    return file


def read_rows(path, roles, **options):
    """All rows of a table, and what the scan of it has found."""
    table = TableBatches(path, roles, **options)
    rows = table.sample()
    return SimpleNamespace(**vars(rows), scan=table.scan, take=rows.take, rows=len(rows))


def save(folder, text):
    file = folder / "odd.csv"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def test_csv_and_parquet_give_the_same_rows(path, tmp_path):
    TABLE.to_parquet(tmp_path / "table.parquet")
    (tmp_path / "table.parquet").rename(tmp_path / "any.name")  # the content decides
    for file in (path, tmp_path / "any.name"):
        rows = read_rows(file, Roles(("sex",), "y"))
        assert list(rows.X.columns) == ["a", "b"]
        np.testing.assert_array_equal(rows.X, TABLE[["a", "b"]])
        np.testing.assert_array_equal(rows.y, TABLE["y"])
        assert list(rows.groups["sex"]) == list("fmfm")
        assert rows.scan.labels == ("f", "m")
        assert (rows.rows, rows.scan.dropped) == (4, 0)
        assert rows.scan.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()


def test_inputs_are_the_other_columns_or_those_that_are_named(path):
    assert list(read_rows(path, Roles(("sex",))).X) == ["a", "b", "y"]
    assert list(read_rows(path, Roles(("b",), "y", features=("sex", "b"))).X) == ["sex", "b"]
    with_predictions = read_rows(path, Roles(("sex",), "y", "a"))
    assert with_predictions.X.shape == (4, 0)
    assert list(with_predictions.predictions) == [1, 2, 3, 4]


def test_several_attributes_and_part_of_the_rows(path):
    rows = read_rows(path, Roles(("sex", "b"), "y"))
    assert rows.scan.labels == (("f", 0), ("m", 1))
    part = rows.take(np.array([True, True, False, False]))
    assert (len(part), list(part.y), list(part.X["a"])) == (2, [0.5, 1.5], [1, 2])


@pytest.mark.parametrize("mark", [b"\xef\xbb\xbf", b""])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_line_ends_and_byte_order_marks(tmp_path, mark, end):
    rows = read_rows(save(tmp_path, mark + end.join(["a,sex", "1,f", "2,m"]).encode()), Roles(("sex",)))
    assert list(rows.X.columns) == ["a"]
    assert list(rows.X["a"]) == [1, 2]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        (" \n \n", "is empty"),
        ("a,sex\n", "2 columns and no rows"),
        ("x" * 10_000_000, "field larger than field limit"),
        (b"a,sex\n\xff\xfe,1\n", "not text in UTF-8"),
        (b"\x08\x00\x01model", "neither Parquet nor text"),
        ("a,b\n1,2\n", "no column 'sex'"),
        ("a,sex\n1,2\n1,2,3,4\n", "line 3 has 4 fields, more than the header has names (2)"),
        ("a,sex\n1,2,3\n4,5,6\n", "line 2 has 3 fields, more than the header has names (2)"),
        ("a,sex,a\n1,f,2\n", "header has 'a' more than once"),
        ("a:sex\n1:f\n", "no column 'sex'"),
        (b"\x1f\x8b\x08 cut short", "cannot be read as a table"),
        (b"PK\x03\x04 cut short", "cannot be read as a table"),
        (b"PAR1 cut short", "cannot be read as a table"),
        ('a,sex\n"1,f\n2,m\n', "cannot be read as a table"),
    ],
)
def test_files_that_are_no_table(tmp_path, text, said):
    with pytest.raises(ValueError, match=r"odd\.csv") as error:
        read_rows(save(tmp_path, text), Roles(("sex",)))
    assert said in str(error.value)
    assert len(str(error.value)) < 400


def test_paths_that_lead_to_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file"):
        open_table(tmp_path / "none.csv")
    with pytest.raises(ValueError, match="the directory has no files; Parquet files are needed"):
        open_table(tmp_path)
    with pytest.raises(ValueError, match="not there"):
        open_table(f"file://{tmp_path}/none")


def test_a_directory_of_partitions_is_read_by_path_and_by_uri(tmp_path):
    rng = np.random.default_rng(0)
    people = pd.DataFrame({"id": np.arange(90), "a": rng.normal(size=90), "y": rng.normal(size=90)})
    people["sex"], people["year"] = rng.choice(["f", "m"], 90), rng.choice([2023, 2024], 90)
    people.to_parquet(tmp_path / "people", partition_cols=["year", "sex"])
    (tmp_path / "people" / "_SUCCESS").touch()
    rows = read_rows(tmp_path / "people", Roles(("sex",), "y"))
    found = rows.X.assign(y=rows.y, sex=rows.groups["sex"]).sort_values("id").reset_index(drop=True)
    pd.testing.assert_frame_equal(found[list(people)], people, check_dtype=False)
    again = read_rows(f"file://{tmp_path}/people", Roles(("sex",), "y"))
    pd.testing.assert_frame_equal(again.X, rows.X)
    listed = subprocess.run(
        "find . -name '*.parquet' -printf '%P\\n' | LC_ALL=C sort | xargs sha256sum | sha256sum",
        shell=True, cwd=tmp_path / "people", capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert listed.stdout.split()[0] == rows.scan.sha256 == again.scan.sha256


def test_files_of_a_directory_may_differ_in_types_and_columns_but_not_in_kind(tmp_path):
    TABLE.to_parquet(tmp_path / "a.parquet")
    other = TABLE.drop(columns="a").assign(y=[1, 2, 3, 4])
    other.to_parquet(tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=rf"{len(TABLE)} of {2 * len(TABLE)} rows \('a' {len(TABLE)}\)"):
        read_rows(tmp_path, Roles(("sex",), "y", features=("a",)))
    assert read_rows(tmp_path, Roles(("sex",), "y", features=("a",)), drop_missing=True).rows == len(TABLE)
    (tmp_path / "c.csv").write_text("a,sex,y\n1,f,2\n")
    with pytest.raises(ValueError, match=r"c\.csv' is not Parquet"):
        open_table(tmp_path)


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    TABLE.to_parquet(tmp_path / "table.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"esvdfair\[data\]"):
        open_table(tmp_path / "table.parquet")


@pytest.mark.parametrize(
    ("roles", "said"),
    [
        (Roles(("Sexe",)), "no column 'Sexe'. Did you mean 'sex'? It has 'a', 'b', 'y', 'sex'."),
        (Roles(("unheard",)), "no column 'unheard'. It has"),
        (Roles(("sex",), features=("a", "bb")), "no column 'bb'"),
        (Roles(("sex",), "sex"), "'sex' is the target and something else"),
        (Roles(("sex",), "y", features=("a", "y")), "'y' is the target and something else"),
        (Roles(("sex",), "y", "y"), "'y' is the predictions and something else"),
        (Roles(("sex",), features=("a", "a")), "named twice: 'a'"),
        (Roles(("sex", "sex")), "named twice"),
        (Roles(("sex", "a", "b", "y")), "no column left"),
        (Roles(()), "no sensitive column"),
        (Roles(("b",), "sex"), "the target, is not numeric, for example 'f'"),
        (Roles(("b",), None, "sex"), "the predictions, is not numeric"),
    ],
)
def test_roles_that_do_not_fit(path, roles, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        read_rows(path, roles)


def test_missing_values_are_counted_in_the_columns_that_matter(tmp_path):
    file = save(tmp_path, "a,b,y,sex\n,1,1,f\n2,,1,m\n3,1,,f\n4,1,1,\n5,1,1,m\n6,1,1,f\n")
    roles = Roles(("sex",), "y", features=("a",))
    with pytest.raises(
        ValueError, match=r"3 of 6 rows \('a' 1, 'y' 1, 'sex' 1\).*`drop_missing` leaves.*; `missing_group` makes"
    ):
        read_rows(file, roles)
    rows = read_rows(file, roles, drop_missing=True)
    assert (list(rows.X["a"]), rows.scan.dropped, list(rows.X.index)) == ([2, 5, 6], 3, [1, 4, 5])
    with pytest.raises(ValueError, match=r"2 of 6 rows \('a' 1, 'y' 1\)\. `drop_missing` leaves those rows out\.$"):
        read_rows(file, roles, missing_group=True)
    grouped = read_rows(file, roles, drop_missing=True, missing_group=True)
    assert grouped.scan.labels == ("f", "m", "missing")


def test_missing_values_of_inputs_may_stay(tmp_path):
    file = save(tmp_path, "a,b,y,sex\n,1,1,f\n2,,1,m\n3,1,,f\n4,1,1,\n5,1,1,m\n6,1,1,f\n")
    roles = Roles(("sex",), "y", features=("a", "b"))
    with pytest.raises(ValueError, match=r"2 of 6 rows \('y' 1, 'sex' 1\)"):
        read_rows(file, roles, missing_inputs=True)
    rows = read_rows(file, roles, missing_inputs=True, drop_missing=True)
    assert (list(rows.X["a"]), rows.scan.dropped) == ([5, 6], 4)
    with pytest.raises(ValueError, match="'sex' 1"):  # an attribute that is an input must be there
        read_rows(file, Roles(("sex",), features=("a", "sex")), missing_inputs=True)
    whole = save(tmp_path, "a,b,y,sex\n,1,1,f\n2,,1,m\n5,1,1,m\n6,1,1,f\n")
    rows = read_rows(whole, roles, missing_inputs=True)
    np.testing.assert_array_equal(rows.X, [[np.nan, 1], [2, np.nan], [5, 1], [6, 1]])


def test_numeric_attributes_with_missing_values_stay_whole(tmp_path):
    file = save(tmp_path, "a,b\n1,0\n2,1\n3,\n")
    assert read_rows(file, Roles(("b",)), missing_group=True).scan.labels == (0, 1, "missing")
    with pytest.raises(ValueError, match="'b' 1"):  # an input too, and there it is missing
        read_rows(file, Roles(("b",), features=("a", "b")), missing_group=True)


def test_nullable_columns_of_parquet(tmp_path):
    table = TABLE.assign(y=pd.array([1, None, 3, 4], dtype="Int64"))
    table.to_parquet(tmp_path / "t.parquet")
    rows = read_rows(tmp_path / "t.parquet", Roles(("sex",), "y"), drop_missing=True)
    assert rows.y.dtype == np.float64
    assert list(rows.y) == [1, 3, 4]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,sex\n1,f\n2,f\n", "all 2 rows of"),
        ("a,sex\ninf,f\n2,m\n", "'a' of"),
        ("a,sex\n1,0.5\n2,0.25\n", "the sensitive column 'sex' contains the fractional value"),
        ("a,sex\n,f\n,m\n", "none is left"),
    ],
)
def test_rows_that_cannot_be_used(tmp_path, text, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        read_rows(save(tmp_path, text), Roles(("sex",)), drop_missing=True)


def test_long_names_are_cut_in_errors(tmp_path):
    names = [f"column_{i}_" + "x" * 500 for i in range(40)]
    file = save(tmp_path, ",".join(names) + "\n" + ",".join("1" for _ in names) + "\n")
    with pytest.raises(ValueError, match="and 28 more") as error:
        read_rows(file, Roles(("sex",)))
    assert len(str(error.value)) < 1200


# --- other marks, compressed files ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sep", ["\t", ";", "|", ","])
def test_the_header_tells_what_separates_the_fields(tmp_path, sep):
    odd = TABLE.assign(sex=['f"x', f"m{sep}y", "f\nz", "m"])
    odd.to_csv(tmp_path / "odd.txt", sep=sep, index=False)
    rows = read_rows(tmp_path / "odd.txt", Roles(("sex",), "y"))
    assert list(rows.groups["sex"]) == list(odd["sex"])
    np.testing.assert_array_equal(rows.X, TABLE[["a", "b"]])


def test_a_mark_can_be_named(tmp_path):
    file = save(tmp_path, "a:sex\n1:f\n2:m\n")
    assert list(read_rows(file, Roles(("sex",)), sep=":").X["a"]) == [1, 2]
    file = save(tmp_path, "a;sex\n1;f\n2;m\n")
    with pytest.raises(ValueError, match=r"separated by another character: use `sep`\.$"):
        read_rows(file, Roles(("sex",)), sep=",")
    file = save(tmp_path, '"a;b","sex;x"\n1,f\n2,m\n')  # marks in quotes do not count
    assert list(read_rows(file, Roles(("sex;x",))).X) == ["a;b"]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("packed", ["gz", "zip"])
def test_compressed_files_are_read_and_known_by_their_own_hash(tmp_path, kind, packed):
    getattr(TABLE, f"to_{kind}")(tmp_path / "plain", index=False)
    content, path = (tmp_path / "plain").read_bytes(), tmp_path / "packed"
    if packed == "gz":
        path.write_bytes(gzip.compress(content))
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("folder/people", content)
    rows = read_rows(path, Roles(("sex",), "y"))
    np.testing.assert_array_equal(rows.X, TABLE[["a", "b"]])
    assert rows.scan.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_damaged_and_crowded_archives(tmp_path):
    whole = gzip.compress(b"a,sex\n" + b"1,f\n2,m\n" * 500)
    for content in (whole[:40], whole[:-1], whole[:20] + bytes(8) + whole[28:]):
        with pytest.raises(ValueError, match=r"odd\.csv' cannot be read as a table: "):
            open_table(save(tmp_path, content))
    with zipfile.ZipFile(tmp_path / "two.zip", "w") as archive:
        archive.writestr("a", "x")
        archive.writestr("b", "x")
    with pytest.raises(ValueError, match="holds 2 files; one table is needed"):
        open_table(tmp_path / "two.zip")


def test_a_parquet_file_of_no_rows(tmp_path):
    TABLE[:0].to_parquet(tmp_path / "none.parquet")
    with pytest.raises(ValueError, match="4 columns and no rows"):
        read_rows(tmp_path / "none.parquet", Roles(("sex",), "y"))


# --- weights and small groups --------------------------------------------------------------------------------------


def test_weights_come_with_the_rows(tmp_path):
    file = save(tmp_path, "a,w,sex\n1,1,f\n2,0.5,m\n3,2,f\n")
    roles = Roles(("sex",), weight="w")
    rows = read_rows(file, roles)
    assert (list(rows.X), list(rows.weight)) == (["a"], [1, 0.5, 2])
    assert list(rows.take(np.array([True, False, True])).weight) == [1, 2]
    (batch,) = TableBatches(file, roles)
    assert batch.weight.tolist() == [1, 0.5, 2]
    with pytest.raises(ValueError, match=r"'w' of .*, the weight, holds negative"):
        read_rows(save(tmp_path, "a,w,sex\n1,1,f\n2,-1,m\n"), roles)
    with pytest.raises(ValueError, match="'a' is the weight and something else"):
        read_rows(file, Roles(("sex",), features=("a",), weight="a"))


def test_small_groups_are_left_out_or_joined(tmp_path):
    sexes = ["f"] * 5 + ["m"] * 4 + ["x"] * 2 + ["z"]
    file = save(tmp_path, "a,sex\n" + "".join(f"{i},{sex}\n" for i, sex in enumerate(sexes)))
    with pytest.warns(ESVDFairWarning, match=r"3 rows of .* were left out, as .* fewer than 3: 'x' 2, 'z' 1\."):
        rows = read_rows(file, Roles(("sex",)), min_group_rows=3)
    assert (rows.scan.labels, rows.scan.sizes, rows.scan.rows) == (("f", "m"), (5, 4), 9)
    assert (rows.scan.small, rows.scan.dropped, list(rows.X.index)) == ({"x": 2, "z": 1}, 0, list(range(9)))
    with pytest.warns(ESVDFairWarning, match="became the group 'other'"):
        rows = read_rows(file, Roles(("sex",)), min_group_rows=3, other=True)
    assert (rows.scan.labels, rows.scan.sizes, rows.rows) == (("f", "m", "other"), (5, 4, 3), 12)
    assert list(rows.groups["sex"][9:]) == ["other"] * 3
    with pytest.raises(ValueError, match=r"has 1 of 4 groups with 5 rows or more \(`min_group_rows=5`\)"):
        read_rows(file, Roles(("sex",)), min_group_rows=5)


def test_small_combinations_are_joined(tmp_path):
    pairs = [("f", 0)] * 3 + [("m", 0)] * 3 + [("f", 1), ("m", 1)]
    file = save(tmp_path, "a,sex,b\n" + "".join(f"1,{sex},{b}\n" for sex, b in pairs))
    with pytest.warns(ESVDFairWarning, match="became the group"):
        rows = read_rows(file, Roles(("sex", "b")), min_group_rows=2, other=True)
    assert rows.scan.labels == (("f", 0), ("m", 0), ("other", "other"))
    (table,) = [part.labels for part in TableBatches(file, Roles(("sex", "b")))]
    assert len(table) == 4
