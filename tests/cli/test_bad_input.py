"""What a person at a terminal gets wrong: one clear line, exit code 2, and nothing is left behind."""

import os
import subprocess
import sys
from threading import Thread

import numpy as np
import onnx
import pandas as pd
import pytest

from esvdfair import tables

ROLES = ["--sensitive", "sex", "--target", "income"]


@pytest.fixture
def refuses(files, refused, tmp_path, written):
    """`repair` on another table or model is refused and writes nothing; gives the line."""
    place = tmp_path / "out"
    place.mkdir()

    def run(*, data=files.data, model=files.model, roles=ROLES, more=()):
        said = refused("repair", model, data, *roles, *more, "-o", place / "fair.onnx", "--report", place / "page.html")
        assert written(place) == []
        return said

    return run


@pytest.fixture
def changed(files, tmp_path):
    """A table like that of `files` with something else in it."""

    def save(**columns):
        data = pd.read_csv(files.data)
        for name, values in columns.items():
            data[name] = values(data[name]) if callable(values) else values
        data.to_csv(tmp_path / "changed.csv", index=False)
        return tmp_path / "changed.csv"

    return save


def holes(*rows):
    return lambda column: column.where(~np.isin(np.arange(len(column)), rows))


def test_a_file_that_is_not_there(refuses, tmp_path):
    assert "there is no file" in refuses(data=tmp_path / "none.csv")
    assert "there is no file" in refuses(model=tmp_path / "none.onnx")


def test_a_directory(refuses, tmp_path):
    assert "the directory has no files; Parquet files are needed" in refuses(data=tmp_path)
    assert "is a directory" in refuses(model=tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"sex,income,age,hours,school\nm,1,2,3,4,5,6\n", "line 2 has 7 fields, more than the header has names (5)"),
        (
            b"sex,income,age,hours,school\nm,1,2,3,4\nm,1,2,3,4,5\n",
            "line 3 has 6 fields, more than the header has names (5)",
        ),
        (b"sex,income,age,hours,school\n", "5 columns and no rows"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "neither Parquet nor text in UTF-8"),
        (b"sex,income,age,hours,school\n\xe9,1,2,3,4\n", "not text in UTF-8"),
        (b"x" * 10_000_000, "cannot be read as a table"),
        (b'sex,income,age,hours,school\n"m,1,2,3,4\nf,1,2,3,4\n', "cannot be read as a table"),
    ],
)
def test_a_malformed_table(refuses, tmp_path, content, said):
    path = tmp_path / "odd.csv"
    path.write_bytes(content)
    assert said in refuses(data=path)


def test_a_table_given_as_the_model_and_the_other_way_round(refuses, files):
    assert "is not an ONNX model but a table; the model comes first: MODEL DATA" in refuses(model=files.data)
    assert "the model comes first: MODEL DATA" in refuses(model=files.new, data=files.model)
    assert "neither Parquet nor text in UTF-8" in refuses(data=files.model)


def test_a_model_of_another_width_is_refused_before_the_scan(refuses, monkeypatch):
    def scan(*_, **__):
        raise AssertionError("the table was scanned")

    monkeypatch.setattr(tables, "scan_table", scan)
    assert "the model takes 3 columns and" in refuses(roles=["--sensitive", "sex"])


def test_a_model_of_another_width_for_rows_from_a_pipe(refuses, files, tmp_path):
    """What comes through a pipe is read once only, so its header is not looked at beforehand."""
    os.mkfifo(tmp_path / "pipe")
    writer = Thread(target=lambda: (tmp_path / "pipe").write_bytes(files.data.read_bytes()), daemon=True)
    writer.start()
    assert "the model takes 3 columns and" in refuses(data=tmp_path / "pipe", roles=["--sensitive", "sex"])
    writer.join(timeout=10)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--layer", "0"], "--layer 0 was given, but --method transport edits the last layer alone"),
        (["--layer", "-1", "--method", "exact"], "is the output layer, but --method exact edits a hidden layer"),
    ],
)  # fmt: skip
def test_options_that_contradict_each_other_are_called_by_their_names(refuses, options, said):
    assert said in refuses(more=options)


def test_a_sensitive_column_of_many_numbers(refuses, changed):
    said = refuses(data=changed(sex=np.arange(600)))
    assert "the sensitive column 'sex' has 600 different whole numbers" in said
    assert "Bin it first" in said


@pytest.mark.parametrize("part", [0.0, 0.01, 0.5, 0.9, 0.999])
def test_a_truncated_model(refuses, files, tmp_path, part):
    whole = files.model.read_bytes()
    (tmp_path / "cut.onnx").write_bytes(whole[: int(part * len(whole))])
    assert "cut.onnx" in refuses(model=tmp_path / "cut.onnx")


@pytest.mark.parametrize("part", [0.0, 0.001, 0.5, 0.99])
def test_a_truncated_parquet_file(refuses, files, tmp_path, part):
    whole = files.new.read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: max(int(part * len(whole)), 4)])
    assert "cannot be read as a table" in refuses(data=tmp_path / "cut.parquet")


def test_a_parquet_file_with_a_broken_page(refuses, files, tmp_path):
    content = bytearray(files.new.read_bytes())
    content[8:2000] = bytes(1992)
    (tmp_path / "broken.parquet").write_bytes(content)
    assert "cannot be read as a table" in refuses(data=tmp_path / "broken.parquet")


@pytest.mark.parametrize(
    ("roles", "said"),
    [
        (["--sensitive", "Sexe", "--target", "income"], "has no column 'Sexe'. Did you mean 'sex'?"),
        (["--sensitive", "sex", "--target", "incme"], "has no column 'incme'. Did you mean 'income'?"),
        ([*ROLES, "--features", "age,hours,scool"], "has no column 'scool'. Did you mean 'school'?"),
        (["--sensitive", "zzz"], "has no column 'zzz'. It has 'age'"),
    ],
)
def test_a_column_that_is_not_there(refuses, roles, said):
    assert said in refuses(roles=roles)


def test_a_target_that_is_not_numeric(refuses, changed):
    path = changed(income=lambda column: column.astype(object).where(column.index != 500, "a lot"))
    assert "'income' of" in refuses(data=path)
    assert "the target, is not numeric, for example 'a lot'" in refuses(data=path)


def test_an_input_that_is_not_numeric(refuses, changed):
    path = changed(age=lambda column: column.astype(object).where(column.index != 500, "old"))
    assert "column 'age' is not numeric" in refuses(data=path)


def test_one_group_only(refuses, changed):
    assert "all 600 rows of" in refuses(data=changed(sex="female"))
    assert "are of one group, 'female' in 'sex'; parity needs two" in refuses(data=changed(sex="female"))


def test_missing_values(refuses, changed, invoke, files, tmp_path):
    path = changed(age=holes(3, 7), sex=holes(7, 8, 9))
    said = refuses(data=path)
    assert "missing values in 4 of 600 rows ('sex' 3, 'age' 2)" in said
    assert "--drop-missing leaves those rows out; --missing-group makes people without a group a group" in said
    assert "missing values in 2 of 600 rows ('age' 2)" in refuses(data=path, more=["--missing-group"])
    words = ["repair", files.model, path, *ROLES, "--method", "exact", "-o", tmp_path / "fair.onnx", "--drop-missing"]
    assert invoke(*words).exit_code == 0
    assert "all 600 rows of" in refuses(data=changed(age=np.nan), more=["--drop-missing"])


def test_a_missing_group_is_a_group(invoke, changed, files):
    path = changed(sex=holes(*range(0, 600, 6)))
    result = invoke("audit", files.model, path, *ROLES, "--missing-group")
    assert result.exit_code == 0
    assert "\nmissing" in result.stdout


def test_infinite_values(refuses, changed):
    path = changed(age=lambda column: column.where(column.index != 3, np.inf))
    assert "column 'age' of" in refuses(data=path)
    assert "holds 1 infinite values; correct or remove those rows" in refuses(data=path)


def test_a_mark_that_does_not_separate(refuses, files):
    assert "separated by another character: use --sep" in refuses(more=["--sep", ";"])
    assert "one character is needed" in refuses(more=["--sep", "::"])


@pytest.mark.parametrize(
    ("name", "how"),
    [("net.pt", "torch.onnx.export("), ("net.pkl", "skl2onnx.to_onnx("), ("net.keras", "model.export(")],
)
def test_models_of_other_formats_are_told_how_to_export(refuses, tmp_path, name, how):
    (tmp_path / name).write_bytes(b"PK\x03\x04 something")
    said = refuses(model=tmp_path / name)
    assert "is not an ONNX model" in said
    assert how in said


@pytest.mark.parametrize("place", [0, 2, 3])
def test_a_label_that_was_forgotten_is_asked_about(refuses, files, tmp_path, place):
    """The label is found by what the model predicts, wherever it stands and whatever it is called."""
    data = pd.read_csv(files.data)
    columns = ["age", "hours", "school"]
    columns.insert(place, "y")
    data.assign(y=data["income"])[[*columns, "sex"]].to_csv(tmp_path / "t.csv", index=False)
    assert refuses(data=tmp_path / "t.csv", roles=["--sensitive", "sex"]).endswith(
        "gives it 4: " + ", ".join(columns) + ". Is 'y' the label? Add --target y\n"
    )
    data.assign(y=data["income"], town="here")[[*columns, "town", "sex"]].to_csv(tmp_path / "t.csv", index=False)
    asked = refuses(data=tmp_path / "t.csv", roles=["--sensitive", "sex"])
    assert asked.endswith("Is 'y' the label? Add --target y --features age,hours,school\n")


@pytest.mark.parametrize("stray", [np.arange(600), "text"], ids=["numbers", "text"])
def test_a_column_that_is_no_input_is_named(refuses, changed, stray):
    said = refuses(data=changed(stray=stray))
    assert said.endswith("If stray is no input, leave it out: --features age,hours,school\n")


def test_a_column_too_few(refuses, changed, files, tmp_path):
    pd.read_csv(files.data).drop(columns="age").to_csv(tmp_path / "few.csv", index=False)
    said = refuses(data=tmp_path / "few.csv")
    assert (
        "Not given to it: sex (sensitive), income (target). Name the model's inputs, in its order: --features" in said
    )


@pytest.mark.parametrize(("given", "meant"), [("peple.csv", "people.csv"), ("nothing-like-it", None)])
def test_a_file_name_with_a_slip(refuses, tmp_path, files, given, meant):
    said = refuses(data=files.folder / given)
    assert f"there is no file '{files.folder / given}'." in said
    assert (f"Did you mean '{files.folder / str(meant)}'?" in said) is (meant is not None)


def test_a_result_with_the_extension_of_another_format(refused, files, tmp_path, written):
    said = refused("repair", files.model, files.data, *ROLES, "-o", tmp_path / "fair.txt")
    assert f"Write it to '{tmp_path / 'fair.onnx'}'." in said
    assert written() == []


def test_a_pipe_or_a_device_as_the_model(refuses, tmp_path):
    os.mkfifo(tmp_path / "pipe.onnx")
    assert "is a pipe or a device" in refuses(model=tmp_path / "pipe.onnx")
    assert "is a pipe or a device" in refuses(model="/dev/zero")


def test_a_model_that_takes_too_long(refuses, files, tmp_path, monkeypatch):
    """A loop that never ends; the option reaches the model, and only this command's."""
    monkeypatch.setenv("ESVDFAIR_TIME_LIMIT", "600")  # what the option sets goes with the test
    model = onnx.load(files.model)
    body = onnx.parser.parse_graph("body (int64 i, bool c, float[N, K] v) => (bool d, float[N, K] w) "
                                   "{ d = Identity(c) w = Neg(v) }")  # fmt: skip
    old = model.graph.output[0].name
    yes = onnx.numpy_helper.from_array(np.array(True), "yes")
    model.graph.initializer.append(yes)
    model.graph.node.append(onnx.helper.make_node("Loop", ["", "yes", old], ["forever"], body=body))
    model.graph.output[0].name = "forever"
    onnx.save(model, tmp_path / "endless.onnx")
    said = refuses(model=tmp_path / "endless.onnx", more=["--model-timeout", "0.2"])
    assert "has not finished a batch of" in said
    assert "in 0.2 seconds, maybe for an endless loop" in said
    assert "'--model-timeout': 0.0 is not in the range" in refuses(more=["--model-timeout", "0"])


@pytest.mark.parametrize("error", [MemoryError(), RecursionError("too deep")])
def test_a_file_that_needs_too_much_memory(refuses, monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(tables, "scan_table", fail)
    assert "this needs more memory than there is" in refuses()


def test_a_fault_of_ours_is_no_target_that_was_not_met(invoke, files, monkeypatch):
    def fail(*_, **__):
        raise KeyError("something")

    monkeypatch.setattr(tables, "scan_table", fail)
    result = invoke("audit", files.model, files.data, *ROLES)
    assert result.exit_code == 70
    assert "KeyError" in result.stderr


def test_nobody_reads_the_output():
    """`esvdfair … | head`: silent, and not the exit code of a target that was not met."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "esvdfair", "audit", "--help"], stdout=writing, stderr=subprocess.PIPE, timeout=120,
        check=False,
    )  # fmt: skip
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_full_disk_behind_stdout(files):
    """What is printed cannot be written: an error, not a silent success."""
    words = ["audit", files.scores, "--predictions", "score", "--sensitive", "sex"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "esvdfair", *map(str, words)],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_missing_is_explained(refused, files):
    said = refused("audit", files.model, files.data)
    assert said.startswith("esvdfair: Missing option '--sensitive': Column with the group of each person.")
    assert said.endswith("See `esvdfair audit --help`.\n")
    assert "Missing argument 'MODEL'. See `esvdfair curve --help`." in refused("curve", "--sensitive", "sex")
