import hashlib
import json
import shutil
from dataclasses import replace

import numpy as np
import onnx
import pandas as pd
import pytest
from click.testing import CliRunner

from esvdfair.cli import main
from esvdfair.core.moments import GroupMoments
from esvdfair.federated import MIN_ROWS, SiteMoments
from esvdfair.models.onnx import OnnxAdapter

ROLES = ["--sensitive", "sex", "--target", "income"]
FEATURES = ["age", "hours", "school"]


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def collected(files, tmp_path_factory):
    """`a.moments`, `b.moments` and `all.moments`, from the two halves of the data."""
    folder = tmp_path_factory.mktemp("collected")
    people = pd.read_csv(files.data)
    for name, part in (("a", people[:250]), ("b", people[250:])):
        table, moments = folder / f"{name}.csv", folder / f"{name}.moments"
        part.to_csv(table, index=False)
        run("moments", "collect", files.model, table, *ROLES, "-o", moments)
    run("moments", "merge", folder / "a.moments", folder / "b.moments", "-o", folder / "all.moments")
    return folder


def run(*words):
    done = CliRunner().invoke(main, list(map(str, words)))
    assert (done.exit_code, done.stderr) == (0, "")


@pytest.fixture
def sites(collected, tmp_path):
    """A folder with these files, which a test may add to."""
    shutil.copytree(collected, tmp_path / "sites")
    return tmp_path / "sites"


@pytest.fixture
def out(tmp_path):
    return tmp_path / "fair.onnx"


def test_sites_add_up_to_all_rows(files, invoke, sites, tmp_path):
    done = invoke("moments", "collect", files.model, files.data, *ROLES, "-o", tmp_path / "whole.moments")
    assert done.exit_code == 0
    for said in (
        "moments of 600 rows",
        "8 inputs of layer last and the label income",
        sha256(files.model),
        "female",
        "R²",
    ):
        assert said in done.stdout
    whole, merged = SiteMoments.load(tmp_path / "whole.moments"), SiteMoments.load(sites / "all.moments")
    np.testing.assert_array_equal(whole.moments.rows, merged.moments.rows)
    np.testing.assert_allclose(merged.moments.means, whole.moments.means, rtol=1e-10)
    scale = np.abs(whole.moments.scatters).max()
    np.testing.assert_allclose(merged.moments.scatters, whole.moments.scatters, rtol=0, atol=1e-10 * scale)
    assert (merged.sensitive, merged.features, merged.target) == (("sex",), tuple(FEATURES), "income")
    assert [site.name for site in merged.sites] == ["a.moments", "b.moments"]


def test_json_of_all_three(files, invoke, sites, tmp_path):
    collected = json.loads(
        invoke("moments", "collect", files.model, files.data, *ROLES, "-o", tmp_path / "w.moments", "--json").stdout
    )
    merged = json.loads(
        invoke(
            "moments", "merge", sites / "a.moments", sites / "b.moments", "-o", tmp_path / "m.moments", "--json"
        ).stdout
    )
    shown = json.loads(invoke("moments", "show", tmp_path / "m.moments", "--json").stdout)
    assert shown.pop("warning") is None
    assert shown == merged
    assert merged["sha256"] == sha256(tmp_path / "m.moments")
    assert merged["model"] == collected["model"] == sha256(files.model)
    assert merged["predictions"]["mean_gap"] == pytest.approx(collected["predictions"]["mean_gap"])
    audited = json.loads(invoke("audit", files.model, files.data, *ROLES, "--json").stdout)
    assert collected["predictions"]["mean_gap"] == pytest.approx(audited["mean_gap"], rel=1e-5)
    assert collected["predictions"]["mse"] == pytest.approx(audited["mse"], rel=1e-5)


def test_show_warns_of_few_rows(files, invoke, refused, tmp_path):
    people = pd.read_csv(files.data)
    few = pd.concat([people[people.sex == "male"], people[people.sex == "female"][:3]])
    few.to_csv(tmp_path / "few.csv", index=False)
    words = ["moments", "collect", files.model, tmp_path / "few.csv", *ROLES, "-o", tmp_path / "few.moments"]
    said = refused(*words)
    assert "fewer rows than --min-rows 10: 'female' has 3" in said
    assert "that person's row" in said
    assert not (tmp_path / "few.moments").exists()
    assert invoke(*words, "--unsafe").exit_code == 0
    shown = invoke("moments", "show", tmp_path / "few.moments")
    assert shown.exit_code == 0
    assert "note: do not send this file on: " in shown.stderr
    assert "few rows in a group (female) tell much about each of them" in shown.stderr


def test_show_warns_of_people_who_can_be_read(invoke, sites):
    assert invoke("moments", "show", sites / "a.moments").stderr == ""
    site = SiteMoments.load(sites / "a.moments")
    rows = np.random.default_rng(0).normal(size=(50, 9))
    rows[:, 3] = np.arange(50) == 17  # a unit that is active for one person
    replace(site, moments=GroupMoments().update(rows, ["female"] * 50)).save(sites / "bare.moments")
    assert "the rows of 1 people can be read from it" in invoke("moments", "show", sites / "bare.moments").stderr


def test_a_site_with_one_group(files, invoke, tmp_path):
    people = pd.read_csv(files.data)
    for sex in ("female", "male"):
        people[people.sex == sex].to_csv(tmp_path / "one.csv", index=False)
        done = invoke(
            "moments", "collect", files.model, tmp_path / "one.csv", *ROLES, "-o", tmp_path / f"{sex}.moments"
        )
        assert done.exit_code == 0
        assert "gap of means" not in done.stdout
    merged = invoke(
        "moments", "merge", tmp_path / "female.moments", tmp_path / "male.moments", "-o", tmp_path / "all.moments"
    )
    assert merged.exit_code == 0
    assert merged.stderr.startswith("note: some groups are not at every site: ")
    assert "gap of means" in merged.stdout


def test_without_a_target(files, invoke, tmp_path, out):
    bare = tmp_path / "bare.csv"
    pd.read_csv(files.data).drop(columns="income").to_csv(bare, index=False)
    done = invoke("moments", "collect", files.model, bare, "--sensitive", "sex", "-o", tmp_path / "a.moments")
    assert ", no label" in done.stdout
    done = invoke("repair", files.model, "--moments", tmp_path / "a.moments", "--method", "parity", "-o", out)
    assert done.exit_code == 0
    assert "mean squared change" in done.stdout
    assert "R²" not in done.stdout


def test_masked_files_add_up_and_keys_serve_once(files, invoke, refused, sites, tmp_path):
    for name in "ab":
        assert "stays here" in invoke("moments", "keygen", "-o", tmp_path / f"{name}.key").stdout
    for name, other in ("ab", "ba"):
        words = ["moments", "collect", files.model, sites / f"{name}.csv", *ROLES, "-o", tmp_path / f"{name}.masked"]
        words += ["--mask-with", tmp_path / f"{name}.key", "--peer", tmp_path / f"{other}.key.pub"]
        assert "--group lacks ['female']" in refused(*words, "--group", "male")
        done = invoke(*words, "--group", "male", "--group", "female", "--json")
        assert done.exit_code == 0
        assert "has served and is deleted" in done.stderr
        assert not (tmp_path / f"{name}.key").exists()
    merge = ["moments", "merge", tmp_path / "a.masked", "-o", tmp_path / "all.moments"]
    assert "2 sites masked their moments for each other, and 1 files are here" in refused(*merge)
    assert (
        "site 2                not named, masked: its rows are not told" in invoke(*merge, tmp_path / "b.masked").stdout
    )
    found, plain = SiteMoments.load(tmp_path / "all.moments"), SiteMoments.load(sites / "all.moments")
    np.testing.assert_allclose(found.moments.scatters, plain.moments.scatters, rtol=1e-9)
    assert "is not a moments file" in refused("moments", "show", tmp_path / "a.masked")
    assert "belong to --mask-with" in refused(
        "moments", "collect", files.model, files.data, *ROLES, "-o", "x", "--peer", "y"
    )


def test_noise_is_accounted_for_in_file_and_record(files, invoke, refused, tmp_path, out):
    words = ["moments", "collect", files.model, files.data, *ROLES, "-o", tmp_path / "a.moments", "--epsilon", 8]
    assert "--epsilon 8 needs --public" in refused(*words)
    done = invoke(*words, "--public", files.new)
    assert done.exit_code == 0
    assert "epsilon 8, delta 1e-06, along " in done.stdout
    done = invoke("repair", files.model, "--moments", tmp_path / "a.moments", "--method", "parity", "-o", out)
    assert done.exit_code == 0
    record = json.loads((tmp_path / "fair.onnx.json").read_text())
    (site,) = record["moments"]["sites"]
    assert (site["noise"]["epsilon"], site["noise"]["delta"]) == (8.0, 1e-6)


def test_strata_travel_with_the_moments(files, invoke, tmp_path, out):
    people = pd.read_csv(files.data)
    people["region"] = np.where(people.age > people.age.median(), "north", "south")
    people.to_csv(tmp_path / "regions.csv", index=False)
    words = ["moments", "collect", files.model, tmp_path / "regions.csv", *ROLES, "--control", "region"]
    words += ["--features", ",".join(FEATURES)]
    done = invoke(*words, "-o", tmp_path / "a.moments")
    assert "adjusted for          region, 4 cells" in done.stdout
    repair = ["repair", files.model, "--moments", tmp_path / "a.moments", "--method", "parity", "--quick"]
    done = invoke(*repair, "--validation", tmp_path / "regions.csv", "--target", "income", "-o", out)
    assert done.exit_code == 0
    assert json.loads((tmp_path / "fair.onnx.json").read_text())["reached"]["outside_support"] == 0
    assert invoke(*repair, "-o", tmp_path / "blind.onnx").exit_code == 0


# --- repair --moments --------------------------------------------------------------------------------------------


def test_a_repair_without_any_row(files, invoke, sites, out, tmp_path, written):
    words = ["repair", files.model, "--moments", sites / "all.moments", "--method", "parity", "-o", out]
    done = invoke(*words)
    assert (done.exit_code, done.stderr) == (0, "")
    for said in ("from moments of 600 rows at 2 sites", "gap of means", "R²", "of female", "KS distance: unknown."):
        assert said in done.stdout
    assert written() == ["fair.onnx", "fair.onnx.json", "sites"]
    onnx.checker.check_model(onnx.load(out))
    people = pd.read_csv(files.data)
    before, after = (OnnxAdapter(path).predict(people[FEATURES]).astype(float) for path in (files.model, out))
    groups = [people.sex == sex for sex in ("female", "male")]
    assert abs(before[groups[0]].mean() - before[groups[1]].mean()) > 0.3
    assert after[groups[0]].mean() == pytest.approx(after[groups[1]].mean(), abs=1e-5)
    assert after[groups[0]].var(ddof=1) == pytest.approx(after[groups[1]].var(ddof=1), abs=1e-5)

    record = json.loads((tmp_path / "fair.onnx.json").read_text())
    assert record["command"] == ["esvdfair", *map(str, words)]
    assert record["data"] is record["validation"] is None
    found = record["moments"]
    assert (found["path"], found["sha256"]) == (str(sites / "all.moments"), sha256(sites / "all.moments"))
    assert found["group_sizes"] == people.sex.value_counts().to_dict()
    assert [site["name"] for site in found["sites"]] == ["a.moments", "b.moments"]
    reached = record["reached"]
    assert (reached["evaluated_on"], reached["ks_after"], record["point"]) == ("moments", None, None)
    assert reached["mse_after"] == pytest.approx(((after - people.income) ** 2).mean(), rel=1e-5)
    assert record["model_after"]["sha256"] == {"fair.onnx": sha256(out)}


def test_validation_rows_choose(files, invoke, sites, out, tmp_path):
    words = ["repair", files.model, "--moments", sites / "all.moments", "--method", "parity", *ROLES]
    words += ["--validation", files.new, "--target-ks", 0.2, "--quick"]
    done = invoke(*words, "-o", out)
    assert (done.exit_code, done.stderr) == (0, "")
    assert "Target KS ≤ 0.2: met" in done.stdout
    assert "at 2 sites; judged on 400 rows, the rows of --validation" in done.stdout
    record = json.loads((tmp_path / "fair.onnx.json").read_text())
    assert record["validation"]["sha256"] == sha256(files.new)
    assert record["reached"]["evaluated_on"] == "validation"
    audited = json.loads(invoke("audit", out, files.new, *ROLES, "--json").stdout)
    assert record["reached"]["ks_after"] == pytest.approx(audited["ks"], abs=0.006)
    # Columns that are not named are those of the moments.
    again = tmp_path / "again.onnx"
    short = [word for word in words if word not in ("--sensitive", "sex")]
    assert invoke(*short, "-o", again).exit_code == 0
    assert again.read_bytes() == out.read_bytes()


def test_a_target_out_of_reach_gives_exit_code_1_and_a_file(files, invoke, sites, out, tmp_path):
    words = ["repair", files.model, "--moments", sites / "all.moments", "--method", "parity", *ROLES, "-o", out]
    done = invoke(*words, "--validation", files.new, "--target-ks", 0, "--quick", "--json")
    assert done.exit_code == 1
    assert out.exists()
    assert json.loads(done.stdout) == json.loads((tmp_path / "fair.onnx.json").read_text())


def test_a_report_of_validation_rows(files, invoke, sites, out, tmp_path):
    words = ["repair", files.model, "--moments", sites / "all.moments", "--method", "parity", *ROLES, "-o", out]
    done = invoke(*words, "--quick", "--validation", files.new, "--report", tmp_path / "report.html")
    assert done.exit_code == 0
    assert "<html" in (tmp_path / "report.html").read_text()[:200]


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--method", "transport"], "--method transport needs rows"),
        ([], "--method transport needs rows"),
        (["--method", "exact"], "--method exact needs rows"),
        (["--method", "parity", "--layer", "0"], "--layer belongs to --method exact and paper"),
        (["--method", "parity", "--target-ks", "0.1"], "--target-ks 0.1 needs validation rows: a KS distance cannot"),
        (["--method", "parity", "--report", "r.html"], "--report needs --validation FILE"),
        (["--method", "parity", "--validation", "nowhere.csv"], "there is no file 'nowhere.csv'"),
        (["--method", "parity", "--output", "z"], "the model has no output 'z'"),
    ],
)
def test_what_moments_cannot_do(files, refused, sites, out, tmp_path, written, words, said):
    assert said in refused("repair", files.model, "--moments", sites / "all.moments", *words, "-o", out)
    assert written() == ["sites"]


def test_rows_and_moments(files, refused, sites, out, written):
    words = ["--moments", sites / "all.moments", "--method", "parity", *ROLES, "-o", out]
    assert "got both" in refused("repair", files.model, files.data, *words)
    assert "Missing argument 'DATA'" in refused("repair", files.model, *ROLES, "-o", out)
    assert "Missing option '--sensitive'" in refused("repair", files.model, files.data, "-o", out)
    assert written() == ["sites"]


@pytest.fixture
def other_model(files, tmp_path):
    """The model with another weight."""
    proto = onnx.load(files.model)
    tensor = proto.graph.initializer[0]
    values = onnx.numpy_helper.to_array(tensor).copy()
    values[0, 0] += 1
    tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    path = tmp_path / "sites" / "other.onnx"
    onnx.save(proto, path)
    return path


def test_moments_of_another_model(files, refused, invoke, sites, other_model, out, written):
    said = refused("repair", other_model, "--moments", sites / "all.moments", "--method", "parity", "-o", out)
    assert "another model" in said
    assert sha256(files.model) in said
    assert sha256(other_model) in said
    assert written() == ["sites"]
    words = ["collect", other_model, sites / "b.csv", *ROLES, "-o", sites / "o.moments"]
    assert invoke("moments", *words).exit_code == 0
    said = refused("moments", "merge", sites / "a.moments", sites / "o.moments", "-o", out)
    assert "they differ in the model (SHA-256)" in said
    assert "o.moments'" in said
    assert sha256(other_model) in said
    assert written() == ["sites"]


def test_merge_refuses(files, refused, invoke, sites, out, written):
    a, b, whole = (sites / f"{name}.moments" for name in ("a", "b", "all"))
    assert "holds the same rows as" in refused("moments", "merge", a, a, "-o", out)
    copy = sites / "copy.moments"
    copy.write_bytes(a.read_bytes())
    assert "copy.moments' holds the same rows as" in refused("moments", "merge", a, b, copy, "-o", out)
    assert "all.moments' holds the same rows as" in refused("moments", "merge", b, whole, "-o", out)
    table = pd.read_csv(sites / "b.csv").rename(columns={"sex": "gender"})
    table.to_csv(sites / "g.csv", index=False)
    done = invoke(
        "moments", "collect", files.model, sites / "g.csv",
        "--sensitive", "gender", "--target", "income", "-o", sites / "g.moments",
    )  # fmt: skip
    assert done.exit_code == 0
    said = refused("moments", "merge", a, sites / "g.moments", "-o", out)
    assert "the sensitive columns: 'gender' as column 1 in" in said
    done = invoke(
        "moments", "collect", files.model, sites / "b.csv",
        "--sensitive", "sex", "--features", "age,hours,school", "-o", sites / "u.moments",
    )  # fmt: skip
    assert done.exit_code == 0
    assert "the label: no label in" in refused("moments", "merge", a, sites / "u.moments", "-o", out)
    assert "there is no file" in refused("moments", "merge", a, sites / "lost.moments", "-o", out)
    assert "is not a moments file" in refused("moments", "merge", a, sites / "b.csv", "-o", out)
    GroupMoments().update(np.eye(4), [0, 0, 1, 1]).save(sites / "bare.moments")
    assert "does not say which model" in refused("moments", "merge", a, sites / "bare.moments", "-o", out)
    assert "Missing argument 'FILE" in refused("moments", "merge", "-o", out)
    assert written() == ["sites"]


def test_files_are_replaced_only_by_force(files, invoke, refused, sites, out):
    merge = ["moments", "merge", sites / "a.moments", sites / "b.moments", "-o", out]
    collect = ["moments", "collect", files.model, files.data, *ROLES, "-o", out]
    for words in (merge, collect):
        out.write_text("old")
        assert "is there already; --force replaces it" in refused(*words)
        assert out.read_text() == "old"
        assert invoke(*words, "--force").exit_code == 0
        SiteMoments.load(out)
    words = ["moments", "merge", sites / "a.moments", sites / "b.moments", "-o", sites / "a.moments", "--force"]
    assert "is a file that is read" in refused(*words)


def test_collect_refuses_bad_input_and_leaves_nothing(files, refused, out, written):
    words = ["moments", "collect", files.model, files.data]
    assert "Did you mean 'sex'?" in refused(*words, "--sensitive", "sx", "-o", out)
    assert "the model takes 3 columns" in refused(*words, *ROLES, "--features", "age,hours", "-o", out)
    assert "Missing option '--sensitive'" in refused(*words, "-o", out)
    assert "is not an ONNX model" in refused("moments", "collect", files.data, files.data, *ROLES, "-o", out)
    assert written() == []


def test_help(invoke):
    group = main.get_command(None, "moments")
    (fewest,) = (option for option in group.commands["collect"].params if option.name == "min_rows")
    assert fewest.default == MIN_ROWS
    assert invoke("moments").stdout.startswith("Usage: esvdfair moments")
    for name, command in group.commands.items():
        shown = invoke("moments", name, "--help").stdout
        assert "--json" in shown
        assert f"esvdfair moments {name} " in command.help
