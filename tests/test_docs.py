"""What README and guides show runs, prints what they say it prints, and every link leads somewhere."""

import pkgutil
import re
import shlex
import shutil
from dataclasses import astuple
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

from esvdfair import Effort, ESVDFair, datasets
from esvdfair.cli import main

ROOT = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # torch's exporter, in its own code
    pytest.mark.filterwarnings("ignore::esvdfair.exceptions.ESVDFairWarning"),  # fewer candidates may miss a target
]
BLOCK = re.compile(r"(<!-- not run: .*? -->\n)?^```(\w+)\n(.*?)^```$", re.S | re.M)


def blocks(name, language):
    """Blocks of one language that are to be run, in order."""
    text = (ROOT / name).read_text("utf-8")
    return [body for skipped, found, body in BLOCK.findall(text) if found == language and not skipped]


def run_all(name, prepare):
    """Run the Python blocks of a page in order, in one namespace; `prepare` adds what a block takes as given."""
    names = {}
    for number, code in enumerate(blocks(name, "python")):
        prepare.get(number, lambda names: None)(names)
        exec(compile(code, f"{name}, block {number}", "exec"), names)  # these are our own pages
    return names


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """A folder of its own, and less effort, which no page names: what is shown is the same."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Effort.__init__, "__defaults__", astuple(Effort.quick()))
    pytest.importorskip("matplotlib", reason="needs the extra esvdfair[plots]").use("Agg")


@pytest.fixture
def few(monkeypatch):
    """Fewer people in the wages table."""
    everybody = datasets.load_wages()

    class Few:
        X = everybody.X.iloc[:1500]
        y = everybody.y.iloc[:1500]
        sensitive_features = everybody.sensitive_features.iloc[:1500]

    monkeypatch.setattr(datasets, "load_wages", Few)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The files that docs/cli.md makes."""
    folder = tmp_path_factory.mktemp("files")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (code,) = blocks("docs/cli.md", "python")
        exec(compile(code, "docs/cli.md", "exec"), {})
    return folder


def given_network(names):
    """What the README's PyTorch example takes as given: a module, rows to fit, rows to judge."""
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    race = rng.choice(["black", "white"], 1200)
    X = (rng.normal(size=(1200, 4)) + 0.5 * (race == "white")[:, None]).astype(np.float32)
    y = X.sum(axis=1) + rng.normal(size=1200)
    fit, judge = slice(0, 800), slice(800, None)
    names.update(X=X[fit], y=y[fit], race=race[fit], X_val=X[judge], y_val=y[judge], race_val=race[judge])
    names.update(network=nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).eval(), torch=torch)
    names.update(example=torch.zeros(2, 4))


def given_pipeline(names):
    import joblib

    names.update(joblib=joblib)


def test_readme(few, files, monkeypatch):
    # Torch's own, and slow to start; the guide for ONNX runs it.
    monkeypatch.setattr(torch.onnx, "export", lambda model, rows, path, **options: Path(path).touch())

    def given_file(names):
        shutil.copy(files / "model.onnx", "model.onnx")
        X = datasets.load_wages().X.to_numpy()
        sex = datasets.load_wages().sensitive_features.to_numpy()
        names["fair"] = ESVDFair("model.onnx", method="parity").fit(X, sensitive_features=sex)

    names = run_all("README.md", {1: given_network, 3: given_pipeline, 4: given_file})
    assert {"fair.pt", "fair.joblib", "fair.onnx"} <= {path.name for path in Path().iterdir()}
    assert isinstance(names["gentler"], nn.Sequential)


def test_guide_for_python(few):
    from matplotlib import pyplot

    names = run_all("docs/python.md", {})
    assert names["fair"].summary_["ks_after"] < names["fair"].summary_["ks_before"]
    assert Path("report.html").stat().st_size > 10_000
    pyplot.close("all")


def test_guide_for_onnx(few):
    names = run_all("docs/onnx.md", {})
    assert names["fair"].summary_["ks_after"] < names["fair"].summary_["ks_before"]
    assert {"model.onnx", "network.onnx", "fair.onnx", "by-column.onnx"} <= {path.name for path in Path().iterdir()}


def test_commands_of_the_readme(files):
    for name in ("model.onnx", "people.csv"):
        shutil.copy(files / name, name)
    table = Path("people.csv")
    table.write_text(table.read_text().replace("lwage", "income", 1))
    commands = [line for block in blocks("README.md", "console") for line in block.splitlines()]
    ours = [shlex.split(line)[1:] for line in commands if line.startswith("esvdfair")]
    assert [words[0] for words in ours] == ["audit", "repair"]
    for words in ours:
        result = CliRunner().invoke(main, words)
        assert result.exit_code in (0, 1), result.output  # 1: done, but fewer candidates may miss a target
    assert {"fair.onnx", "fair.onnx.json", "report.html"} <= {path.name for path in Path().iterdir()}


def test_the_picture_is_made_by_the_command_that_the_readme_names():
    assert "esvdfair demo --plot docs/img/demo.svg" in (ROOT / "README.md").read_text("utf-8")
    assert (ROOT / "docs/img/demo.svg").stat().st_size < 100_000


def sessions(block):
    """Pairs of a command and the lines that are shown below it."""
    parts = re.split(r"^\$ (.*)\n", block, flags=re.M)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


def wordy(text):
    """Lines of words alone, without the width of columns: numbers and rules differ between machines."""
    lines = (" ".join(line.split()) for line in re.sub("─+", "─", text).splitlines())
    return [line for line in lines if re.search(r"[a-z]", line) and not re.search(r"\d", line)]


def test_guide_for_the_command_line(files):
    for path in files.iterdir():
        shutil.copy(path, path.name)
    result, run = None, []
    for command, shown in (pair for block in blocks("docs/cli.md", "console") for pair in sessions(block)):
        if command == "echo $?":
            assert shown.strip() == str(result.exit_code)
            continue
        result = CliRunner().invoke(main, shlex.split(command)[1:], prog_name="esvdfair")
        run.append(command.split()[1])
        assert result.exception is None or isinstance(result.exception, SystemExit), command
        printed = iter(wordy(result.output))
        missing = [line for line in wordy(shown) if not any(line == other for other in printed)]
        assert missing == [], f"{command} does not print, in this order: {missing}"
        assert bool(re.search(r"\d", shown)) == bool(re.search(r"\d", result.output))
    assert {"audit", "explain", "curve", "repair"} <= set(run)


def test_the_guide_names_every_command():
    text = (ROOT / "docs/cli.md").read_text("utf-8")
    assert [name for name in main.list_commands(None) if f"`{name}`" not in text] == []


def test_functions_and_tests_of_the_equations_are_there():
    rows = re.findall(r"^\|.*\| (.*?) \| (.*?) \|$", (ROOT / "docs/equations.md").read_text("utf-8"), re.M)[2:]
    assert len(rows) > 20
    for functions, tests in rows:
        for name in re.findall("`(.*?)`", functions):
            assert pkgutil.resolve_name(f"esvdfair.{name}"), name
        for place, _, test in (name.partition("::") for name in re.findall("`(.*?)`", tests)):
            assert f"def {test}(" in (ROOT / "tests" / place).read_text("utf-8") or not test, f"{place} lacks {test}"


PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]


def anchors(page):
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text("utf-8"), flags=re.S | re.M)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        place, _, anchor = link.partition("#")
        target = (ROOT / page).parent / place if place else ROOT / page
        assert target.exists(), f"{page} links to {link}, which is not there"
        assert not anchor or anchor in anchors(target), f"{page} links to {link}, which is no heading"
