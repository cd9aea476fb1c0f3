import json
import warnings
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

from esvdfair import ESVDFairWarning
from esvdfair.cli._terminal import at_work, in_options, text_table
from esvdfair.cli.curve import scatter
from esvdfair.exceptions import InputError
from esvdfair.text import distinct_names, interval, number, printable, quoted, share, to_json


def test_columns_stand_under_each_other():
    assert text_table(["name", "n"], [["a", "1"], ["longer", "1,000"]]).splitlines() == [
        "name        n",
        "─────────────",
        "a           1",
        "longer  1,000",
    ]


def test_text_of_a_user_neither_steers_nor_breaks():
    assert printable("a\x1b[2J\nb") == "a\\x1b[2J\\nb"
    assert printable("x" * 100) == "x" * 39 + "…"
    assert printable("Zoë") == "Zoë"
    assert quoted("a\n" + "x" * 90) == "'a\\n" + "x" * 56 + "…'"


def test_numbers():
    assert (number(0.123456), number(None), number(float("nan"))) == ("0.123", "–", "–")
    assert (share(0.1), interval((0.1, 0.25)), interval(None)) == ("0.100", "[0.1, 0.25]", "–")


def test_json_is_strict_and_plain():
    value = {("a", 1): np.float64(0.5), "b": np.array([1, 2]), 3: float("inf"), "p": Path("x"), "t": (True, None)}
    assert json.loads(to_json(value)) == {"a, 1": 0.5, "b": [1, 2], "3": None, "p": "x", "t": [True, None]}


def test_labels_that_are_written_alike_have_keys_of_their_own():
    sizes = {("a, b", "c"): 1, ("a", "b, c"): 2, ("a", "b"): 3}
    assert json.loads(to_json(sizes)) == {'["a, b", "c"]': 1, '["a", "b, c"]': 2, "a, b": 3}
    assert distinct_names([1, "1", "2"]) == ["1", '"1"', "2"]


@pytest.mark.parametrize(
    ("parameter", "option"),
    [
        ("target_ks=0.1", "--target-ks 0.1"),
        ("layer='MatMul'", "--layer MatMul"),
        ("method='exact'", "--method exact"),
        ("output", "--output NAME"),
        ("output='z'", "--output z"),
        ("validation", "--validation FILE"),
        ("sensitive_features", "--sensitive"),
        ("y", "--target"),
        ("X", "the table"),
        ("random_state=3", "--seed 3"),
        ("missing='group'", "--missing-group"),
        ("missing='error'", "`missing='error'`"),
        ("drop_missing", "--drop-missing"),
        ("curve_", "`esvdfair curve`"),
        ("refit='ols'", "`refit='ols'`"),
    ],
)
def test_options_are_called_as_they_are_typed(parameter, option):
    assert in_options(InputError(f"Use `{parameter}`, or not.")) == f"Use {option}, or not."


def test_messages_are_one_line_and_names_of_files_stay():
    assert in_options(InputError("`layer=0`\nis  last")) == "--layer 0 is last"
    assert in_options(ValueError("there is no file 'target_ks=0.1.csv'.")) == "there is no file 'target_ks=0.1.csv'."
    assert in_options(InputError("`layer` of 'layer=0'")) == "--layer of 'layer=0'"


def test_points_stand_where_they_belong():
    lines = scatter([0.0, 0.5, 1.0], [3.0, 2.0, 1.0], ["a", "b", "c"], width=13, height=3).splitlines()
    assert lines[0] == "3 │a"
    assert lines[1] == "  │      b"
    assert lines[2] == "1 │            c"
    assert lines[-1].split() == ["0.000", "1.000"]
    assert scatter([1.0], [1.0], ["x"], width=3, height=2)


def test_warnings_of_the_library_become_notes_and_others_are_silent():
    @click.command()
    def command():
        with at_work():
            for _ in range(2):
                warnings.warn(ESVDFairWarning("1\nhere, `validation` or"), stacklevel=1)
            warnings.warn("of somebody else", UserWarning, stacklevel=1)

    result = CliRunner().invoke(command)
    assert result.stderr == "note: 1 here, --validation FILE or\n"
