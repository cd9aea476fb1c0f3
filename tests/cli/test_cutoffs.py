"""--cutoff and --select-share of `audit` and `repair`."""

import json

import numpy as np
import pandas as pd

from esvdfair import decisions
from esvdfair.models.onnx import OnnxAdapter


def test_an_audit_says_who_is_selected(invoke, files):
    words = ["audit", files.scores, "--predictions", "score", "--sensitive", "sex", "--features", "income"]
    table = pd.read_csv(files.scores)
    expected = decisions(table["score"], table["score"], sensitive_features=table["sex"], select_share=0.2)
    result = invoke(*words, "--select-share", 0.2, "--cutoff", 0.5)
    assert result.exit_code == 0
    assert f"A cut-off of {expected.cutoff_before:g} selects 20%." in " ".join(result.stdout.split())
    assert "A cut-off of 0.5 selects" in result.stdout
    assert f"against male: {expected.ratio_after['female']:.3f}" in " ".join(result.stdout.split())
    told = json.loads(invoke(*words, "--select-share", 0.2, "--json").stdout)["decisions"]
    assert [one["ratio_after"]["female"] for one in told] == [expected.ratio_after["female"]]
    assert json.loads(invoke(*words, "--json").stdout)["decisions"] == []


def test_a_repair_says_which_cutoff_to_use(invoke, files, tmp_path):
    out = tmp_path / "fair.onnx"
    words = [
        "repair",
        files.model,
        files.data,
        "--sensitive",
        "sex",
        "--target",
        "income",
        "--quick",
        "--target-ks",
        0.15,
    ]
    result = invoke(*words, "--test", files.new, "--select-share", 0.2, "--select", "below", "-o", out)
    assert result.exit_code in (0, 1), result.stderr
    new = pd.read_parquet(files.new)
    before, after = (OnnxAdapter(path).predict(new.iloc[:, :3]) for path in (files.model, out))
    expected = decisions(before, after, sensitive_features=new["sex"], select_share=0.2, select="below")
    assert expected.cutoff_words() in " ".join(result.stdout.split())
    (told,) = json.loads(out.with_name("fair.onnx.json").read_text())["decisions"]
    assert told["cutoff_after"] == expected.cutoff_after
    np.testing.assert_allclose(list(told["selected_after"].values()), list(expected.selected_after.values()))


def test_what_is_refused(refused, files):
    words = ["audit", files.scores, "--predictions", "score", "--sensitive", "sex", "--features", "income"]
    assert "selects nobody: the predictions range from" in refused(*words, "--cutoff", 1e6)
    assert "--select-share" in refused(*words, "--select-share", 20)
