"""What holds for every command."""

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import version

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
    whole = re.sub(r"\\\n *", "", text)  # a long command takes several lines
    return re.findall(r"^ +esvdfair (\S+) ?(.*)$", whole, re.MULTILINE)


def test_the_commands_of_the_contract_are_there():
    assert {"audit", "explain", "repair", "curve", "compare", "summarise", "show", "demo", "doctor"} <= set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_json(name, invoke):
    result = invoke(name, "--help")
    assert result.exit_code == 0
    assert command(name).help
    assert "--json" in result.stdout


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fits_a_narrow_terminal(name, invoke, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = invoke(*name.split(), "--help").stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert "\\b" not in shown


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_examples_and_they_can_be_parsed(name):
    shown = [words for called, words in examples(command(name).help) if called == name]
    assert shown, f"{name} --help has no example"
    for words in shown:
        command(name).make_context(name, shlex.split(words))


@pytest.fixture(scope="module")
def place(files, tmp_path_factory):
    """A folder with the files that the examples name, and what those of `repair` have written."""
    folder = tmp_path_factory.mktemp("examples")
    for path in (files.model, files.scores):
        shutil.copy(path, folder)
    files.people(4000, 5).to_csv(folder / "people.csv", index=False)  # enough to show the targets of the examples
    with contextlib.chdir(folder):
        for called, words in examples(command("summarise").help + command("repair").help):
            result = run(called, words)
            assert result.exit_code == 0, (words, result.stderr)
    return folder


def run(name, words):
    """An example; with few candidates, and over files that others have written, where the command knows these words."""
    known = {option for p in command(name).params for option in p.opts}
    more = [word for word in ("--quick", "--force") if word in known]
    return CliRunner().invoke(main, [name, *shlex.split(words), *more], prog_name="esvdfair")


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"repair", "demo"}))
def test_examples_run(name, place, monkeypatch):
    """Those of `repair` have run before; `demo` takes long and has tests of its own."""
    monkeypatch.chdir(place)
    for called, words in examples(command(name).help):
        result = run(called, words)
        assert (result.exit_code, result.stderr) == (0, ""), words
        assert result.stdout


def test_a_doctor_to_paste(invoke, monkeypatch):
    shown = invoke("doctor").stdout
    for said in (f"esvdfair  {version('esvdfair')}", f"numpy {version('numpy')}", "cores"):
        assert said in shown
    found = json.loads(invoke("doctor", "--json").stdout)
    assert found["onnx"]["onnxruntime"] == version("onnxruntime")
    monkeypatch.setattr("esvdfair.cli.doctor.version_of", lambda name: None)
    assert "torch is not installed: pip install 'esvdfair[torch]'" in invoke("doctor").stdout


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
    ],
)
def test_a_command_that_is_not_there(refused, words, said):
    assert refused(*words) == f"esvdfair: {said}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_values_of_options_have_plain_names(invoke, name):
    shown = invoke(name, "--help").stdout
    assert "--" in shown
    assert not re.search(r"RANGE|TEXT|INTEGER|FLOAT", shown)


def test_python_dash_m_on_a_terminal_without_the_letters(files):
    words = ["audit", files.scores, "--predictions", "score", "--sensitive", "sex", "--target-ks", "0.01"]
    done = subprocess.run(
        [sys.executable, "-m", "esvdfair", *map(str, words)],
        capture_output=True, text=True, env=os.environ | {"PYTHONIOENCODING": "latin-1"}, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "")
    assert "Predictions differ between female and male" in done.stdout
    assert "Target KS ? 0.01: not met (" in done.stdout


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


def test_an_option_is_the_same_in_every_command():
    """Names, value, limits and default; only --target-ks has a default where a target is needed."""
    found = {}
    for name in COMMANDS:
        for option in command(name).params:
            if isinstance(option, click.Option):
                default = None if option.name == "target_ks" else option.default
                found.setdefault(option.name, set()).add(
                    (
                        tuple(option.opts),
                        option.metavar,
                        str(option.type.to_info_dict()),
                        repr(default),
                        option.multiple,
                    )
                )
    different = {name: kinds for name, kinds in found.items() if len(kinds) > 1}
    assert different.keys() <= {"report"}  # the demo writes one unasked
    tables = [name for name in COMMANDS if any(p.name == "sensitive" for p in command(name).params)]
    assert set(tables) == {"audit", "explain", "curve", "repair", "compare", "summarise"}
    assert all(any(p.name == "min_group_rows" for p in command(name).params) for name in tables)
