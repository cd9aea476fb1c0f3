import errno
import hashlib
import json
import os
import re
import resource

import numpy as np
import onnx
import pandas as pd
import pytest

from esvdfair.cli import repair
from esvdfair.models.onnx import OnnxAdapter
from esvdfair.text import number

ROLES = ["--sensitive", "sex", "--target", "income"]
TARGET = ["--method", "parity", "--target-ks", "0.2", "--quick"]
QUICK = ["--method", "exact"]  # one candidate


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_repaired_file_and_its_record(files, invoke, tmp_path, written):
    out = tmp_path / "fair.onnx"
    words = ["repair", files.model, files.data, *ROLES, *TARGET, "--validation", files.new, "-o", out]
    result = invoke(*words)
    assert (result.exit_code, result.stderr) == (0, "")
    assert written() == ["fair.onnx", "fair.onnx.json"]
    for said in (
        "KS distance",
        "mean squared error",
        "of female",
        "meets the target of 0.2",
        "rows of --validation",
    ):
        assert said in " ".join(result.stdout.split())
    record = json.loads((tmp_path / "fair.onnx.json").read_text())
    assert record["command"] == ["esvdfair", *map(str, words)]
    assert record["versions"]["numpy"] == np.__version__
    assert record["data"] == {
        "path": str(files.data), "sha256": sha256(files.data), "rows": 600, "dropped": 0,
        "features": ["age", "hours", "school"], "target": "income", "sensitive": ["sex"], "weight": None,
        "small_groups": {},
    }  # fmt: skip
    assert record["validation"]["sha256"] == sha256(files.new)
    assert record["model_before"]["sha256"] == {"model.onnx": sha256(files.model)}
    assert record["model_after"]["sha256"] == {"fair.onnx": sha256(out)}
    assert (record["parameters"]["method"], record["parameters"]["target_ks"]) == ("parity", 0.2)
    assert [edit["layer"] for edit in record["edits"]] == ["last"]
    assert record["parameters"]["effort"]["ridges"] == [1e-4]
    assert record["point"]["ks"] == pytest.approx(record["reached"]["ks_after"], abs=1e-8)
    assert record["reached"]["error_against"] == "labels"

    # What the record says was reached is what the written file does.
    onnx.checker.check_model(onnx.load(out))
    audited = json.loads(invoke("audit", out, files.new, *ROLES, "--json").stdout)
    reached = record["reached"]
    assert reached["evaluated_on"] == "validation"
    assert reached["ks_after"] == pytest.approx(audited["ks"], abs=0.006)  # one person of a group more or less
    assert reached["mse_after"] == pytest.approx(audited["mse"], rel=1e-4)
    assert reached["ks_population"] <= 0.2 < reached["ks_before"]


def test_json_is_the_record(files, invoke, tmp_path):
    out = tmp_path / "fair.onnx"
    result = invoke("repair", files.model, files.data, *ROLES, *QUICK, "-o", out, "--json")
    assert json.loads(result.stdout) == json.loads((tmp_path / "fair.onnx.json").read_text())


def test_a_target_out_of_reach_gives_exit_code_1_and_a_file(files, invoke, tmp_path, written):
    out = tmp_path / "fair.onnx"
    result = invoke(
        "repair", files.model, files.data, *ROLES, "--method", "parity", "--quick", "--target-ks", 0, "-o", out
    )
    assert result.exit_code == 1
    assert written() == ["fair.onnx", "fair.onnx.json"]
    assert "does not meet the target of 0" in " ".join(result.stdout.split())
    assert result.stderr.startswith("note: --target-ks 0 is below the noise level of every pair of groups")
    assert result.stderr.count("\n") == 1


def test_without_a_target_column_it_keeps_to_the_models_own_predictions(files, invoke, tmp_path):
    data = pd.read_csv(files.data).drop(columns="income")
    data.to_csv(tmp_path / "bare.csv", index=False)
    out = tmp_path / "fair.onnx"
    result = invoke("repair", files.model, tmp_path / "bare.csv", "--sensitive", "sex", *QUICK, "-o", out)
    assert result.exit_code == 0
    assert "mean squared change" in result.stdout
    reached = json.loads((tmp_path / "fair.onnx.json").read_text())["reached"]
    assert (reached["mse_before"], reached["error_against"]) == (0, "predictions")


def test_a_model_that_is_perfect_on_its_labels_has_labels(files, invoke, tmp_path):
    """What errors are against is known, not guessed from an error of zero."""
    data = pd.read_csv(files.data)
    data["income"] = OnnxAdapter(files.model).predict(data[["age", "hours", "school"]])
    data.to_csv(tmp_path / "perfect.csv", index=False)
    result = invoke("repair", files.model, tmp_path / "perfect.csv", *ROLES, *QUICK, "-o", tmp_path / "fair.onnx")
    assert "mean squared error" in result.stdout
    assert json.loads((tmp_path / "fair.onnx.json").read_text())["reached"]["error_against"] == "labels"


@pytest.mark.parametrize("layer", ["0", "-2", "hidden"])
def test_a_layer_by_index_or_name(files, invoke, tmp_path, layer):
    out = tmp_path / "fair.onnx"
    result = invoke("repair", files.model, files.data, *ROLES, "--method", "exact", "--layer", layer, "-o", out)
    assert result.exit_code == 0
    edits = json.loads((tmp_path / "fair.onnx.json").read_text())["edits"]
    assert "hidden" in {edit["layer"] for edit in edits}


def test_files_are_replaced_only_by_force(files, invoke, refused, tmp_path, written):
    out, record = tmp_path / "fair.onnx", tmp_path / "fair.onnx.json"
    words = ["repair", files.model, files.data, *ROLES, *QUICK, "-o", out]
    record.write_text("kept")
    assert "fair.onnx.json' exists. Use --force to overwrite it" in refused(*words)
    assert (record.read_text(), written()) == ("kept", ["fair.onnx.json"])
    out.write_text("old")
    assert "fair.onnx' exists. Use --force" in refused(*words)
    assert invoke(*words, "--force").exit_code == 0
    assert json.loads(record.read_text())["model_after"]["sha256"] == {"fair.onnx": sha256(out)}


def test_what_is_read_is_never_written(files, refused, tmp_path):
    before = sha256(files.model)
    said = refused("repair", files.model, files.data, *ROLES, "-o", files.model, "--force")
    assert "is also read" in said
    link = tmp_path / "link.onnx"
    link.symlink_to(files.model)
    assert "is also read" in refused("repair", files.model, files.data, *ROLES, "-o", link, "--force")
    assert sha256(files.model) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--layer", "0"], "edits the last layer alone"),
        (["--method", "exact", "--layer", "lost"], "lost"),
        (["--method", "best"], "'best' is not one of"),
        (["--target-ks", "2"], "2.0 is not in the range"),
        (["--features", "age,hours"], "the model takes 3 columns"),
        (["--validation", "nowhere.csv"], "there is no file 'nowhere.csv'"),
    ],
)
def test_bad_options_write_nothing(files, refused, tmp_path, written, words, said):
    assert said in refused("repair", files.model, files.data, *ROLES, *words, "-o", tmp_path / "fair.onnx")
    assert written() == []


def test_bad_places(files, refused, tmp_path):
    words = ["repair", files.model, files.data, *ROLES, *QUICK, "-o"]
    assert "is a directory. Name a file in it" in refused(*words, tmp_path)
    assert "there is no folder" in refused(*words, tmp_path / "lost" / "fair.onnx")
    assert "Missing option '-o'" in refused(*words[:-1])


def test_validation_is_read_by_the_names_of_the_inputs(files, invoke, refused, tmp_path):
    new = pd.read_parquet(files.new)
    new.to_csv(tmp_path / "plain.csv", index=False)
    new[new.columns[::-1]].assign(extra=1).to_csv(tmp_path / "new.csv", index=False)
    words = ["repair", files.model, files.data, *ROLES, *QUICK, "-o", tmp_path / "fair.onnx", "--validation"]
    assert invoke(*words, tmp_path / "new.csv").exit_code == 0
    one = json.loads((tmp_path / "fair.onnx.json").read_text())["reached"]
    assert invoke(*words, tmp_path / "plain.csv", "--force").exit_code == 0
    assert json.loads((tmp_path / "fair.onnx.json").read_text())["reached"] == one
    new.drop(columns="hours").to_csv(tmp_path / "short.csv", index=False)
    assert "has no column 'hours'" in refused(*words, tmp_path / "short.csv", "--force")


def test_a_model_that_fits_is_one_file(files, invoke, tmp_path, written):
    (tmp_path / "in").mkdir()
    model, out = tmp_path / "in" / "model.onnx", tmp_path / "fair.onnx"
    onnx.save(onnx.load(files.model), model, save_as_external_data=True, location="weights.bin", size_threshold=0)
    assert invoke("repair", model, files.data, *ROLES, *QUICK, "-o", out).stdout.endswith(f"wrote {out}, {out}.json\n")
    assert written() == ["fair.onnx", "fair.onnx.json", "in"]
    assert np.isfinite(OnnxAdapter(out).predict(np.zeros((2, 3)))).all()


def test_external_data_of_a_large_model_stays_external(files, invoke, refused, tmp_path, written, monkeypatch):
    monkeypatch.setattr(repair, "ONE_FILE", 0)
    model, out = tmp_path / "in" / "model.onnx", tmp_path / "out" / "fair.onnx"
    model.parent.mkdir()
    out.parent.mkdir()
    onnx.save(onnx.load(files.model), model, save_as_external_data=True, location="weights.bin", size_threshold=0)
    words = ["repair", model, files.data, *ROLES, *QUICK, "-o", out]
    (out.parent / "fair.onnx.data").write_text("of another model")
    assert "fair.onnx.data' exists. Use --force" in refused(*words)
    (out.parent / "fair.onnx.data").unlink()
    result = invoke(*words)
    assert result.exit_code == 0
    assert result.stdout.endswith(f"wrote {out}, {out}.data, {out}.json\n")
    assert written(out.parent) == ["fair.onnx", "fair.onnx.data", "fair.onnx.json"]
    record = json.loads((out.parent / "fair.onnx.json").read_text())
    assert record["model_before"]["sha256"].keys() == {"model.onnx", "weights.bin"}
    assert record["model_after"]["sha256"]["fair.onnx.data"] == sha256(out.parent / "fair.onnx.data")
    assert np.isfinite(OnnxAdapter(out).predict(np.zeros((2, 3)))).all()


def test_external_data_that_is_read_is_never_written(files, refused, tmp_path):
    """A model that keeps its weights where those of its repair would go, or its report."""
    model, out = tmp_path / "model.onnx", tmp_path / "fair.onnx"
    onnx.save(onnx.load(files.model), model, save_as_external_data=True, location="fair.onnx.data", size_threshold=0)
    words = ["repair", model, files.data, *ROLES, *QUICK, "--force", "-o"]
    before = sha256(tmp_path / "fair.onnx.data")
    assert "fair.onnx.data' is also read" in refused(*words, out)
    weights = tmp_path / "fair.onnx.data"
    assert "is also read" in refused(*words, tmp_path / "other.onnx", "--report", weights)
    assert sha256(weights) == before


def test_the_fairest_within_an_error(files, invoke, refused, tmp_path):
    words = ["repair", files.model, files.data, *ROLES, "--method", "parity", "--quick", "-o", tmp_path / "fair.onnx"]
    reached = json.loads(invoke(*words, "--max-mse-increase", "1.5", "--json").stdout)["reached"]
    assert reached["mse_after"] <= 2.5 * reached["mse_before"]
    assert reached["ks_after"] < reached["ks_before"]
    said = refused(*words, "--force", "--max-mse-increase", "1.5", "--target-ks", "0.1")
    assert "--target-ks 0.1 and --max-mse-increase 1.5 each choose a point" in said


def test_weights_count_people(files, invoke, tmp_path):
    """A row of weight 2 is two rows, in an audit and in what a repair reaches."""
    data = pd.read_csv(files.data)
    data.assign(times=np.where(np.arange(600) < 200, 2, 1)).to_csv(tmp_path / "weighed.csv", index=False)
    pd.concat([data, data[:200]]).to_csv(tmp_path / "twice.csv", index=False)
    weighed, twice = (
        json.loads(invoke("audit", files.model, tmp_path / name, *ROLES, *more, "--json").stdout)
        for name, more in (("weighed.csv", ["--weight", "times"]), ("twice.csv", []))
    )
    for name in ("ks", "mse", "mean_gap"):
        assert weighed[name] == pytest.approx(twice[name])
    out = tmp_path / "fair.onnx"
    words = ["repair", files.model, tmp_path / "weighed.csv", *ROLES, *QUICK, "--weight", "times", "-o", out]
    record = json.loads(invoke(*words, "--validation", tmp_path / "weighed.csv", "--json").stdout)
    assert record["reached"]["mse_before"] == pytest.approx(weighed["mse"], rel=1e-6)
    assert (record["data"]["weight"], record["data"]["features"]) == ("times", ["age", "hours", "school"])


def test_a_file_that_appears_meanwhile_is_not_replaced(files, refused, tmp_path, written, monkeypatch):
    """Two processes that write the same file: one of them says so."""
    out = tmp_path / "fair.onnx"

    def other(*args, **options):
        (tmp_path / "fair.onnx.json").write_text("of another process")

    monkeypatch.setattr("esvdfair.report.write_report", other)
    words = ["repair", files.model, files.data, *ROLES, *QUICK, "-o", out, "--report", tmp_path / "page.html"]
    assert "fair.onnx.json' has appeared meanwhile; nothing was written" in refused(*words)
    assert written() == ["fair.onnx.json"]


def test_what_cannot_be_printed_was_written_all_the_same(files, invoke, tmp_path, written, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("esvdfair.cli._terminal.to_json", full)
    result = invoke("repair", files.model, files.data, *ROLES, *QUICK, "-o", tmp_path / "fair.onnx", "--json")
    assert result.exit_code == 3
    assert "fair.onnx.json, but cannot print the result: No space left on device" in result.stderr
    assert written() == ["fair.onnx", "fair.onnx.json"]


def test_a_full_disk_leaves_what_was_there(files, refused, tmp_path, written, monkeypatch):
    (tmp_path / "fair.onnx").write_text("old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    said = refused("repair", files.model, files.data, *ROLES, *QUICK, "-o", tmp_path / "fair.onnx", "--force")
    assert "cannot write" in said
    assert "No space left on device" in said
    assert written() == ["fair.onnx"]
    assert (tmp_path / "fair.onnx").read_text() == "old"


def test_a_file_that_may_not_grow_leaves_nothing(files, refused, tmp_path, written):
    """As a full disk, but by the system: no file of this process may hold more than 200 bytes."""
    most, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
    try:
        said = refused("repair", files.model, files.data, *ROLES, *QUICK, "-o", tmp_path / "fair.onnx")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    assert "cannot write" in said
    assert "File too large" in said
    assert written() == []


def test_a_report_is_written_with_the_model(files, invoke, tmp_path):
    (tmp_path / "pages").mkdir()
    page = tmp_path / "pages" / "report.html"
    words = ["repair", files.model, files.data, *ROLES, *QUICK, "-o", tmp_path / "fair.onnx", "--report", page]
    result = invoke(*words)
    assert result.exit_code == 0
    assert "report.html" in result.stdout
    assert page.read_text().rstrip().endswith("</html>")
    assert "--report" in page.read_text()  # the command that made it


def test_a_report_is_about_the_rows_that_judged_by_their_numbers_in_the_file(files, invoke, tmp_path):
    data = pd.read_csv(files.data).assign(times=1.0)
    data.loc[:99, "age"] = None
    data.to_csv(tmp_path / "holes.csv", index=False)
    words = [files.model, tmp_path / "holes.csv", *ROLES, "--weight", "times", "--drop-missing", "--unit", "EUR a year"]
    out, page = tmp_path / "fair.onnx", tmp_path / "page.html"
    reached = json.loads(invoke("repair", *words, *QUICK, "-o", out, "--report", page, "--json").stdout)["reached"]
    shown = page.read_text()
    assert f"measured on {reached['rows']} held-out validation rows" in shown
    assert f"estimated population KS of {reached['ks_population']:.3f}" in shown
    for said in ("model.onnx, repaired as fair.onnx", "holes.csv", "income, in EUR a year"):
        assert said in shown
    rows = [int(row) - 1 for row in re.findall(r'<th scope="row">(\d+)</th><td class="text"', shown)]
    before, after = (
        OnnxAdapter(path).predict(data[["age", "hours", "school"]].iloc[rows]) for path in (files.model, out)
    )
    assert len(rows) == 10
    assert min(rows) >= 100
    assert (np.diff(np.abs(after - before)) <= 1e-6).all()


def test_without_its_report_no_model_is_written(files, refused, tmp_path, written, monkeypatch):
    def full(path, *args, **options):
        path.write_text("half of a")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("esvdfair.report.write_report", full)
    (tmp_path / "pages").mkdir()
    words = ["repair", files.model, files.data, *ROLES, *QUICK, "-o", tmp_path / "fair.onnx"]
    assert "No space left on device" in refused(*words, "--report", tmp_path / "pages" / "report.html")
    assert written() == ["pages"]
    assert written(tmp_path / "pages") == []


def test_a_model_card(files, invoke, refused, tmp_path, written):
    hub = pytest.importorskip("huggingface_hub")
    out, place = tmp_path / "fair.onnx", tmp_path / "card.md"
    words = ["repair", files.model, files.data, *ROLES, *TARGET, "--validation", files.new, "-o", out]
    result = invoke(*words, "--model-card", place, "--unit", "EUR a year")
    assert result.exit_code == 0
    assert result.stdout.endswith(f"wrote {out}, {out}.json, {place}\n")
    reached = json.loads((tmp_path / "fair.onnx.json").read_text())["reached"]
    card = hub.ModelCard.load(place)
    metrics = {found.metric_type: found.metric_value for found in card.data.eval_results}
    assert metrics == pytest.approx(
        {"mse": reached["mse_after"], "r_squared": reached["r2_after"], "ks": reached["ks_after"]}
    )
    for said in (
        "income, in EUR a year", "age, hours, school", "people.csv, 600 rows", sha256(files.data), sha256(files.model),
        sha256(out), "female (", "meets the target of 0.2", f"| KS distance | {reached['ks_before']:.3f} |",
        np.__version__,
    ):  # fmt: skip
        assert said in card.text
    assert "card.md' exists. Use --force" in refused(*words[:-1], tmp_path / "other.onnx", "--model-card", place)
    assert written() == ["card.md", "fair.onnx", "fair.onnx.json"]


def test_the_headline_is_about_rows_that_neither_fitted_nor_chose(files, invoke, tmp_path):
    out, page = tmp_path / "fair.onnx", tmp_path / "fair.html"
    words = ["repair", files.model, files.data, *ROLES, *QUICK, "--target-ks", "0.2", "-o", out, "--test", files.new]
    result = invoke(*words, "--report", page)
    record = json.loads((tmp_path / "fair.onnx.json").read_text())
    tested, audited = record["tested"], json.loads(invoke("audit", out, files.new, *ROLES, "--json").stdout)
    assert (tested["evaluated_on"], record["reached"]["evaluated_on"]) == ("test", "heldout")
    assert tested["mse_after"] == pytest.approx(audited["mse"], rel=1e-4)
    assert result.exit_code == (0 if tested["met"] else 1)
    assert "evaluated on 400 rows of test data" in " ".join(result.stdout.split())
    assert number(tested["mse_after"]) in result.stdout
    assert record["test"]["sha256"] == sha256(files.new)
    assert page.exists()


def test_everything_says_of_test_rows_what_the_exit_code_says(files, invoke, tmp_path):
    """Printed verdict, record, report, card: one summary, of rows that neither fitted nor chose."""
    files.people(400, 7).to_csv(tmp_path / "test.csv", index=False)
    for target, code, repaired in (("0.25", 0, True), ("0.3", 1, False)):  # new rows exceed what validation rows meet
        out, page, card = (tmp_path / f"{code}{end}" for end in (".onnx", ".html", ".md"))
        words = [files.model, files.data, *ROLES, "--method", "parity", "--quick", "--validation", files.new]
        words += ["--test", tmp_path / "test.csv", "--target-ks", target]
        result = invoke("repair", *words, "-o", out, "--report", page, "--model-card", card)
        record = json.loads(out.with_name(out.name + ".json").read_text())
        assert result.exit_code == code
        assert record["tested"]["met"] is (code == 0)
        said = record["verdict"]["headline"]
        assert f"{'does not meet' if code else 'meets'} the target of {target}" in said
        for shown in (result.stdout, card.read_text(), page.read_text()):
            assert said in " ".join(shown.replace("\\", "").split())
        assert f"| {record['tested']['ks_after']:.3f} |" in card.read_text()
        assert "400 rows of test data" in page.read_text()
        assert ("repaired model" in said) is repaired


def test_a_table_with_a_tiny_group_is_repaired_and_reported(files, invoke, tmp_path):
    """Of three rows none can be held out, and the two large groups are repaired all the same."""
    data = pd.read_csv(files.data)
    data.loc[:2, "sex"] = "neither"
    data.to_csv(tmp_path / "tiny.csv", index=False)
    out, page, card = tmp_path / "fair.onnx", tmp_path / "fair.html", tmp_path / "card.md"
    words = [files.model, tmp_path / "tiny.csv", *ROLES, "--method", "parity", "--quick", "--target-ks", "0.2"]
    result = invoke("repair", *words, "-o", out, "--report", page, "--model-card", card)
    assert result.exit_code == 0, result.stderr
    assert "1 group is too small to compare and set aside: neither (3 rows)" in result.stderr
    said = "Too small to compare: neither (3 rows)."
    assert said in " ".join(result.stdout.split())
    assert said in page.read_text()
    assert said in card.read_text()
    record = json.loads((tmp_path / "fair.onnx.json").read_text())
    assert record["reached"]["groups_set_aside"] == {"neither": 3}
    assert record["reached"]["ks_after"] < record["reached"]["ks_before"] > 0.25
    assert 0 < record["reached"]["r2_after"] < record["reached"]["r2_before"]
    kept = record["reached"]["r2_after"] / record["reached"]["r2_before"]
    for shown in (" ".join(result.stdout.split()), page.read_text()):
        assert f"keeps {kept:.0%} of the explained variance" in shown


def test_validation_and_test_files_are_named_once_each(files, invoke, tmp_path):
    files.people(400, 7).to_csv(tmp_path / "test.csv", index=False)
    words = [files.model, files.data, *ROLES, "--method", "parity", "--quick", "--validation", files.new]
    words += ["--test", tmp_path / "test.csv", "-o", tmp_path / "fair.onnx", "--report", tmp_path / "fair.html"]
    assert invoke("repair", *words).exit_code == 0
    page = (tmp_path / "fair.html").read_text()
    assert f"{files.data.name}, validation data {files.new.name}, test data test.csv<" in page
    assert "judged on" not in page


def test_rescaled_predictions_keep_their_mean_and_spread(files, invoke, tmp_path):
    words = ["repair", files.model, files.data, *ROLES, "--target-ks", "0.2", "--quick", "--rescale"]
    result = invoke(*words, "--validation", files.new, "-o", tmp_path / "fair.onnx", "--json")
    assert result.exit_code in (0, 1), result.stderr
    assert json.loads(result.stdout)["parameters"]["rescale"] is True
    X = pd.read_csv(files.data)[["age", "hours", "school"]]
    before, after = (OnnxAdapter(path).predict(X) for path in (files.model, tmp_path / "fair.onnx"))
    assert (after.mean(), after.std()) == pytest.approx((before.mean(), before.std()), rel=1e-4)
    assert np.abs(after - before).mean() > 0.05 * before.std()
