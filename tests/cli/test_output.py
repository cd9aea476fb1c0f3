import json
import warnings
from pathlib import Path

import click
import numpy as np
from click.testing import CliRunner

from esvdfair import ESVDFairWarning
from esvdfair.cli._output import interval, notes, number, printable, scatter, share, table, to_json


def test_columns_stand_under_each_other():
    assert table(["name", "n"], [["a", "1"], ["longer", "1,000"]]).splitlines() == [
        "name        n",
        "──────  ─────",
        "a           1",
        "longer  1,000",
    ]


def test_text_of_a_user_neither_steers_nor_breaks():
    assert printable("a\x1b[2J\nb") == "a\\x1b[2J\\nb"
    assert printable("x" * 100) == "x" * 39 + "…"
    assert printable("Zoë") == "Zoë"


def test_numbers():
    assert (number(0.123456), number(None), number(float("nan"))) == ("0.1235", "–", "–")
    assert (share(0.1), interval((0.1, 0.25)), interval(None)) == ("0.100", "[0.1, 0.25]", "–")


def test_json_is_strict_and_plain():
    value = {("a", 1): np.float64(0.5), "b": np.array([1, 2]), 3: float("inf"), "p": Path("x"), "t": (True, None)}
    assert json.loads(to_json(value)) == {"a, 1": 0.5, "b": [1, 2], "3": None, "p": "x", "t": [True, None]}


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
        with notes():
            for _ in range(2):
                warnings.warn(
                    "no candidate meets target_ks=0.1\nhere. Pass validation=, or", ESVDFairWarning, stacklevel=1
                )
            warnings.warn("of somebody else", UserWarning, stacklevel=1)

    result = CliRunner().invoke(command)
    assert result.stderr == "note: no candidate meets --target-ks 0.1 here. Give --validation FILE, or\n"
