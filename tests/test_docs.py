"""What README and guides show runs, prints what they say it prints, and every link leads somewhere."""

import pkgutil
import re
import shlex
import shutil
import tomllib
from contextlib import redirect_stdout
from dataclasses import astuple
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

from esvdfair import Effort, datasets
from esvdfair.cli import main

ROOT = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # torch's exporter, in its own code
    pytest.mark.filterwarnings("ignore::esvdfair.exceptions.ESVDFairWarning"),  # fewer candidates may miss a target
]
# A block of code or output; the comment before it says why it is not run, or how close its numbers are.
BLOCK = re.compile(r"(?:^<!-- (?P<remark>[^>]*) -->\n)?^```(?P<language>\w+)\n(?P<body>.*?)^```$", re.S | re.M)
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")


RENEWED = {}
"""Pages as they are to be, with --renew."""


@pytest.fixture(scope="session", autouse=True)
def renewal(request):
    """With --renew, write what is printed now into the pages."""
    if request.config.getoption("--renew"):
        RENEWED.update({name: (ROOT / name).read_text("utf-8") for name in PAGES})
    yield
    for name, text in RENEWED.items():
        if text != (ROOT / name).read_text("utf-8"):
            (ROOT / name).write_text(text, "utf-8")


def blocks(name, *languages):
    """Blocks that are to be run or compared, in order."""
    found = BLOCK.finditer((ROOT / name).read_text("utf-8"))
    return [block for block in found if block["language"] in languages and "not run" not in (block["remark"] or "")]


def run_all(name, prepare):
    """Run the Python blocks of a page in one namespace and compare what they print with the block that shows it.

    `prepare` adds what a block takes as given, by its number.
    """
    names, printed, number = {}, "", 0
    for block in blocks(name, "python", "text"):
        if block["language"] == "text":
            compare(block["body"], printed, block, f"{name}, below block {number - 1}", page=name)
            continue
        prepare.get(number, lambda names: None)(names)
        with redirect_stdout(StringIO()) as said:
            exec(compile(block["body"], f"{name}, block {number}", "exec"), names)  # these are our own pages
        printed, number = said.getvalue(), number + 1
    return names


def compare(shown, printed, block, place, page=None):
    """Every line that is shown is printed, in this order, with its numbers as close as the comment says; … skips some.

    Without a comment there may be no number: what can differ between machines has to say by how much. With --renew the
    page is written anew instead.
    """
    if page in RENEWED:
        RENEWED[page] = RENEWED[page].replace(shown, renew(shown, printed), 1)
        return
    within = re.search(r"numbers within (\d+) %", block["remark"] or "")
    assert within or not NUMBER.search(shown), f"{place}: say <!-- numbers within N % -->"
    tolerance = float(within[1]) / 100 if within else 0.0
    lines, skips = iter([line for line in printed.splitlines() if line.strip()]), False
    for line in (line for line in shown.splitlines() if line.strip()):
        if line.strip() == "…":
            skips = True
            continue
        tried = []
        for other in lines:
            tried.append(other)
            if alike(line, other, tolerance) or not skips:
                break
        assert tried, f"{place}: {line!r} is not printed"
        assert alike(line, tried[-1], tolerance), f"{place}: {line!r} is shown, {tried[-1]!r} is printed"
        skips = False
    rest = list(lines)
    assert skips or not rest, f"{place}: {rest[0]!r} is printed too"


def renew(shown, printed):
    """What a block shows, from what is printed now: parts between … start where they did and are as long as they were.

    Seconds are left out, as those who wrote the page have done.
    """
    timed = re.search(r" time$", printed, re.M)
    lines = [re.sub(r"\s+([\d.]+ s|time)$", "", line) for line in printed.rstrip("\n").split("\n")]
    lines = [re.sub(r"  ─+$", "", line) if timed and set(line) == {"─", " "} else line for line in lines]
    *parts, last = re.split(r"^( *…\n)", shown, flags=re.M)
    found, end = [], 0
    for part in [*parts, last]:
        wanted = part.rstrip("\n").split("\n")
        if not part or wanted[0].strip() == "…":
            found.append(part)
            continue
        start = min(range(end, len(lines)), key=lambda n: apart(wanted[0], lines[n]))
        end = len(lines) if part is last else start + len(wanted)
        found.append("\n".join(lines[start:end]) + "\n")
    return "".join(found)


def apart(line, other):
    """How far the numbers of two lines are from each other; infinitely where their words differ."""
    if not alike(line, other, 1e9):
        return np.inf
    pairs = zip(NUMBER.findall(line), NUMBER.findall(other), strict=False)
    values = ([float(text.replace(",", "")) for text in pair] for pair in pairs)
    return sum(abs(x - y) / (abs(x) + abs(y) + 1e-9) for x, y in values)


def alike(shown, printed, tolerance):
    """The same words and nearly the same numbers; widths of columns, points of a plot and seconds are not compared."""
    a, b = (re.sub(r"[\s•◉─]+", " ", re.sub(r"\s+([\d.]+ s|time)$", "", line)).strip() for line in (shown, printed))
    pairs = list(zip(NUMBER.findall(a), NUMBER.findall(b), strict=False))
    return NUMBER.sub("#", a) == NUMBER.sub("#", b) and all(near(*pair, tolerance) for pair in pairs)


def near(shown, printed, tolerance):
    """Within the tolerance, or the last digit that is shown."""
    digit = 10.0 ** -len(shown.partition(".")[2]) if "." in shown and "e" not in shown else 0.0
    x, y = (float(text.replace(",", "")) for text in (shown, printed))
    return abs(x - y) <= tolerance * max(abs(x), abs(y)) + 1.01 * digit


def test_numbers_are_compared():
    page = "<!-- numbers within 5 % -->\n```text\n$ x\nKS   0.213, 40% of\n…\n 0.213 │ •  •\n```"
    block = BLOCK.search(page)
    shown = block["body"].removeprefix("$ x\n")
    compare(shown, "KS 0.220, 41% of\nanything\n0.21 │    •\n", block, "a page")
    for wrong in ("KS 0.23, 40% of\n0.213 │ •\n", "KS 0.213, 40% or\n0.213 │ •\n", "KS 0.213, 40% of\n", "\n", ""):
        with pytest.raises(AssertionError, match="a page"):
            compare(shown, wrong, block, "a page")
    with pytest.raises(AssertionError, match="is printed too"):
        compare("KS 0.213\n", "KS 0.213\nmore\n", block, "a page")
    with pytest.raises(AssertionError, match="say <!-- numbers within"):
        compare("KS 0.2\n", "KS 0.2\n", BLOCK.search("```text\nKS 0.2\n```"), "a page")


def test_what_is_shown_can_be_renewed():
    printed = "a  b   time\n─  ──  ────\nx  12   3.1 s\ny  13   9 s\n\nKS 0.5, at\nmost 1\nmore\n"
    assert renew("a b\n─ ─\nx 1\n…\n", printed) == "a  b\n─  ──\nx  12\n…\n"
    assert renew("…\ny 1\n …\nKS 0.6, at\nmost 2\n", printed) == "…\ny  13\n …\nKS 0.5, at\nmost 1\nmore\n"
    assert renew("…\nw 12\n", "w 1\nw 9\nw 11\nw 30\n") == "…\nw 11\nw 30\n"
    whole = "a  b\n─  ──\nx  12\ny  13\n\nKS 0.5, at\nmost 1\nmore\n"
    assert renew("anything", printed) == whole == renew(whole, printed)


@pytest.fixture
def quick(monkeypatch):
    """Less effort, for pages that show no numbers."""
    monkeypatch.setattr(Effort.__init__, "__defaults__", astuple(Effort.quick()))


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """A folder of its own for what a page writes."""
    monkeypatch.chdir(tmp_path)
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
        exec(compile(code["body"], "docs/cli.md", "exec"), {})
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


def test_readme():
    names = run_all("README.md", {1: given_network})
    assert isinstance(names["gentler"], nn.Sequential)


def test_guide_for_trees(quick, tmp_path):
    pytest.importorskip("lightgbm", reason="needs the extra esvdfair[lightgbm]")
    names = run_all("docs/trees.md", {})
    assert names["fair"].summary_["ks_after"] < names["fair"].summary_["ks_before"]
    assert (tmp_path / "fair.txt").stat().st_size > 1000


def test_guide_for_python(few, quick):
    from matplotlib import pyplot

    names = run_all("docs/python.md", {})
    assert names["fair"].summary_["ks_after"] < names["fair"].summary_["ks_before"]
    assert Path("report.html").stat().st_size > 10_000
    pyplot.close("all")


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers", "ignore::DeprecationWarning:transformers")
def test_guide_for_pytorch(few, quick):
    pytest.importorskip("transformers", reason="needs transformers (extra esvdfair[dev])")
    names = run_all("docs/pytorch.md", {})
    assert names["fair"].summary_["ks_after"] < names["fair"].summary_["ks_before"]
    assert Path("repaired/config.json").exists()


@pytest.mark.parametrize("page", ["start", "choose", "cutoffs", "parity", "results"])
def test_pages_that_show_numbers(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    run_all(f"docs/{page}.md", {})


def test_guide_for_large_data(few, quick):
    names = run_all("docs/large-data.md", {})
    assert names["fair"].summary_["ks_after"] < names["fair"].summary_["ks_before"]
    assert names["again"].mass.sum() == names["parts"][0].mass.sum()


def test_guide_for_onnx(few, quick):
    names = run_all("docs/onnx.md", {})
    assert names["fair"].summary_["ks_after"] < names["fair"].summary_["ks_before"]
    assert {"model.onnx", "network.onnx", "fair.onnx", "by-column.onnx"} <= {path.name for path in Path().iterdir()}


def test_commands_of_the_readme(files, quick):
    for name in ("model.onnx", "people.csv"):
        shutil.copy(files / name, name)
    table = Path("people.csv")
    table.write_text(table.read_text().replace("lwage", "income", 1))
    commands = [line for block in blocks("README.md", "console") for line in block["body"].splitlines()]
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


def test_guide_for_the_command_line(files):
    for path in files.iterdir():
        shutil.copy(path, path.name)
    result, run = None, []
    for block in blocks("docs/cli.md", "console"):
        for command, shown in sessions(block["body"]):
            if command == "echo $?":
                assert shown.strip() == str(result.exit_code)
                continue
            result = CliRunner().invoke(main, shlex.split(command)[1:], prog_name="esvdfair")
            run.append(command.split()[1])
            assert result.exception is None or isinstance(result.exception, SystemExit), command
            compare(shown, result.output, block, command, page="docs/cli.md")
    assert {"audit", "explain", "curve", "repair", "compare"} <= set(run)


def test_the_guide_names_every_command():
    text = (ROOT / "docs/cli.md").read_text("utf-8")
    assert [name for name in main.list_commands(None) if f"`{name}`" not in text] == []


def test_functions_and_tests_of_the_equations_are_there():
    rows = re.findall(r"^\|.*\| (.*?) \| (.*?) \|$", (ROOT / "docs/equations.md").read_text("utf-8"), re.M)[2:]
    assert len(rows) > 20
    for functions, tests in rows:
        for name in re.findall("`(.*?)`", functions):
            assert pkgutil.resolve_name(name if name.startswith("reproduction.") else f"esvdfair.{name}"), name
        for place, _, test in (name.partition("::") for name in re.findall("`(.*?)`", tests)):
            home = ROOT if place.startswith("reproduction/") else ROOT / "tests"
            assert f"def {test}(" in (home / place).read_text("utf-8") or not test, f"{place} lacks {test}"


PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in [
        *ROOT.glob("*.md"),
        *(ROOT / "reproduction").glob("*.md"),
        *(ROOT / "benchmarks").glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
    ]
    if path.relative_to(ROOT).parts[1:2] not in [("_build",), ("gallery",), ("reference",)]  # made by `make docs`
)
MADE = ("gallery/", "reference/")  # so are these, and Sphinx checks the links to them


def anchors(page):
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text("utf-8"), flags=re.S | re.M)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link or link.startswith(MADE):
            continue
        place, _, anchor = link.partition("#")
        target = (ROOT / page).parent / place if place else ROOT / page
        assert target.exists(), f"{page} links to {link}, which is not there"
        assert not anchor or anchor in anchors(target), f"{page} links to {link}, which is no heading"


def test_every_source_file_that_is_named_is_there():
    homes = [ROOT, ROOT / "src/esvdfair", ROOT / "tests"]
    for page in (page for page in PAGES if page != "CHANGELOG.md"):  # which tells of files that are gone
        for name in re.findall(r"`([\w/]+/\w+\.(?:py|js|css))`", (ROOT / page).read_text("utf-8")):
            assert any((home / name).exists() for home in homes), f"{page} names {name}, which is not there"


def test_the_readme_of_the_package_links_to_nothing_inside_the_repository():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["metadata"]["hooks"]
    text = (ROOT / "README.md").read_text("utf-8")
    assert re.search(r"\]\(docs/", text)
    for change in settings["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(change["pattern"], change["replacement"], text)
    assert [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith("https://")] == []
    assert "Guide for the command line" in text


def test_the_version_is_the_same_everywhere():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    assert f'__version__ = "{version}"' in (ROOT / "src/esvdfair/__init__.py").read_text("utf-8")
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text("utf-8")


def test_every_make_target_that_is_named_is_there():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    places = [ROOT / name for name in (*PAGES, ".ci/run", ".pre-commit-config.yaml")]
    places += (ROOT / ".github").rglob("*.*") if (ROOT / ".github").exists() else []  # not in the sdist
    for place in (place for place in places if place.exists()):
        text = place.read_text("utf-8")
        if place.suffix == ".md":  # what stands in prose may be a plain English word
            text = "\n".join(re.findall(r"^```.*?^```$|`[^`\n]+`", text, re.S | re.M))
        for words in re.findall(r"(?:^|[`:] ?)make ((?:[a-z-]+ ?)+)", text, re.M):
            assert set(words.split()) <= targets, f"{place.name} names make {words}"


def prose_words(name):
    """Count the words and numbers of a page outside code, formulas and output."""
    made = r"^<!-- \w+: made by .*?^<!-- end of \w+ -->$"  # tables of code, as in models.md
    text = re.sub(rf"^```.*?^```$|^    .*$|{made}", "", (ROOT / name).read_text("utf-8"), flags=re.S | re.M)
    return len(re.findall(r"[A-Za-z]{2,}[\w'-]*|\d[\d,.]*", text))


def test_pages_are_short():
    site = {name: prose_words(name) for name in PAGES if name.startswith("docs/") and "decisions" not in name}
    most = {"docs/method.md": 3000}
    assert {name: words for name, words in site.items() if words > most.get(name, 900)} == {}
    assert sum(site.values()) <= 12_000
    assert len((ROOT / "README.md").read_text("utf-8").split()) <= 900
