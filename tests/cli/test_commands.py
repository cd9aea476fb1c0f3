"""What holds for every command."""

import os
import re
import shlex
import subprocess
import sys

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from esvdfair.cli import main

CONTEXT = click.Context(main, info_name="esvdfair")
COMMANDS = main.list_commands(CONTEXT)


def command(name):
    found = main.get_command(CONTEXT, name)
    assert found is not None
    return found


def examples(text):
    return re.findall(r"^ +esvdfair (\S+) ?(.*)$", text, re.MULTILINE)


def test_the_commands_of_the_contract_are_there():
    assert {"audit", "explain", "repair", "curve", "compare", "reproduce", "demo"} <= set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_json(name, invoke):
    result = invoke(name, "--help")
    assert result.exit_code == 0
    assert command(name).help
    assert "--json" in result.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_examples_and_they_can_be_parsed(name):
    shown = [words for called, words in examples(command(name).help) if called == name]
    assert shown, f"{name} --help has no example"
    for words in shown:
        command(name).make_context(name, shlex.split(words))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_help(name):
    bare = [p.name for p in command(name).params if isinstance(p, click.Option) and not p.help]
    assert bare == []


def test_without_a_command_the_help_is_shown(invoke):
    result = invoke()
    assert result.exit_code == 0
    assert "_ESVDFAIR_COMPLETE=bash_source" in result.stdout
    for name in COMMANDS:
        assert re.search(rf"^  {name} ", result.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["audt"], "there is no command 'audt'; did you mean 'audit'?"),
        (["Repare"], "there is no command 'Repare'; did you mean 'repair'?"),
        (["moments", "colect"], "there is no command 'colect'; did you mean 'collect'?"),
        (["moments", "xyz"], "there is no command 'xyz'; there are collect, merge, show."),
    ],
)
def test_a_command_that_is_not_there(refused, words, said):
    assert refused(*words) == f"esvdfair: {said}\n"


@pytest.mark.parametrize("words", [*([name] for name in COMMANDS), ["moments", "collect"]])
def test_values_of_options_have_plain_names(invoke, words):
    shown = invoke(*words, "--help").stdout
    assert "--" in shown
    assert not re.search(r"RANGE|TEXT|INTEGER|FLOAT", shown)


def test_python_dash_m_on_a_terminal_without_the_letters(files):
    words = ["audit", files.scores, "--predictions", "score", "--sensitive", "sex", "--target-ks", "0.01"]
    done = subprocess.run(
        [sys.executable, "-m", "esvdfair", *map(str, words)],
        capture_output=True, text=True, env=os.environ | {"PYTHONIOENCODING": "latin-1"}, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "")
    assert "The groups are predicted differently" in done.stdout
    assert "Target KS ? 0.01: not met." in done.stdout


@pytest.mark.parametrize(
    ("option", "typed", "offered"),
    [
        ("--sensitive", "s", ["school", "sex"]),
        ("--target", "", ["age", "hours", "school", "income", "sex"]),
        ("--features", "age,h", ["age,hours"]),
        ("--target", "zzz", []),
    ],
)
def test_columns_are_completed(files, option, typed, offered):
    completion = ShellComplete(main, {}, "esvdfair", "_ESVDFAIR_COMPLETE")
    for command in ("audit", "repair", "explain"):
        for data in (files.data, files.new):
            words = [command, str(files.model), str(data), "--seed", "1", option]
            assert [item.value for item in completion.get_completions(words, typed)] == offered
    assert completion.get_completions(["audit", "none.csv", option], typed) == []


def test_columns_of_predictions_are_completed(files):
    completion = ShellComplete(main, {}, "esvdfair", "_ESVDFAIR_COMPLETE")
    (found,) = completion.get_completions(["audit", str(files.scores), "--predictions"], "sc")
    assert found.value == "score"


@pytest.mark.parametrize(("words", "offered"), [("esvdfair rep", "repair"), ("esvdfair repair --tar", "--target-ks")])
def test_shell_completion(words, offered):
    asked = {"_ESVDFAIR_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    assert offered in CliRunner().invoke(main, [], prog_name="esvdfair", env=asked).stdout
