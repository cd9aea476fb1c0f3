"""Files of LightGBM, XGBoost and CatBoost: read, repaired, written in the same format; also on the command line."""

import json
import pickle

import catboost
import lightgbm
import numpy as np
import pandas as pd
import pytest
import xgboost
from click.testing import CliRunner

from esvdfair import Effort, ESVDFair
from esvdfair.cli import main
from esvdfair.exceptions import InputError
from esvdfair.models import adapt, fingerprint
from esvdfair.models.tree_boosters import tree_format

pytestmark = pytest.mark.filterwarnings("ignore:No candidate meets", "ignore:Trees fit")

RNG = np.random.default_rng(0)
GROUP = RNG.integers(0, 2, 800)
X = RNG.normal(size=(800, 3)) + GROUP[:, None] * [1.0, 0, 0]
Y = X[:, 0] + X[:, 1] ** 2 + 0.3 * RNG.normal(size=800)
TABLE = pd.DataFrame(X, columns=["a", "b", "c"])
FORMATS = ("txt", "json", "ubj", "cbm")


@pytest.fixture(params=FORMATS)
def file(request, tmp_path):
    path = tmp_path / f"model.{request.param}"
    if request.param == "txt":
        lightgbm.LGBMRegressor(n_estimators=9, n_jobs=1, verbose=-1).fit(TABLE, Y).booster_.save_model(path)
    elif request.param == "cbm":
        quiet = {"verbose": 0, "thread_count": 1, "allow_writing_files": False}
        catboost.CatBoostRegressor(iterations=9, **quiet).fit(TABLE, Y).save_model(str(path))
    else:
        xgboost.XGBRegressor(n_estimators=9, n_jobs=1).fit(TABLE, Y).save_model(path)
    return path


def test_a_file_is_repaired_to_bytes_of_its_format(file):
    assert f".{tree_format(file)}" == file.suffix
    fair = ESVDFair(file, target_ks=0.2, effort=Effort.quick()).fit(TABLE, Y, sensitive_features=GROUP)
    assert isinstance(fair.estimator_, bytes)
    assert tree_format(fair.estimator_) == tree_format(file)
    assert fair.summary_["ks_after"] < fair.summary_["ks_before"]
    other = file.with_name("other" + file.suffix)
    other.write_bytes(fair.estimator_)
    np.testing.assert_array_equal(adapt(other).predict(TABLE), fair.predict(TABLE))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(fair)).predict(TABLE), fair.predict(TABLE))
    assert len({fingerprint(file), fingerprint(other)}) == 2
    assert fingerprint(other) == fingerprint(fair.estimator_)


def test_commands_take_files_of_trees(file):
    data = file.with_name("people.csv")
    TABLE.assign(sex=np.where(GROUP, "m", "f"), y=Y).to_csv(data, index=False)
    out = file.with_name("fair" + file.suffix)
    columns = [str(file), str(data), "--sensitive", "sex"]
    run = CliRunner().invoke(
        main, ["repair", *columns, "--target", "y", "--target-ks", "0.3", "--quick", "-o", str(out)]
    )
    assert run.exit_code in (0, 1), run.output
    assert tree_format(out) == tree_format(file)
    run = CliRunner().invoke(main, ["audit", str(out), str(data), "--sensitive", "sex", "--target", "y"])
    assert run.exit_code == 0, run.output
    run = CliRunner().invoke(main, ["explain", *columns, "--target", "y", "--json"])
    assert run.exit_code == 0, run.output
    found = json.loads(run.stdout)
    assert found["columns"][0][0] == "a"
    run = CliRunner().invoke(main, ["explain", *columns, "--target", "y"])
    assert "Difference in mean predictions" in run.stdout


def test_the_command_line_keeps_rows_with_missing_values_as_the_model_takes_them(file):
    gaps = TABLE.mask(RNG.random(TABLE.shape) < 0.1)
    data, out = file.with_name("people.csv"), file.with_name("fair" + file.suffix)
    gaps.assign(sex=np.where(GROUP, "m", "f"), y=Y).to_csv(data, index=False)
    columns = [str(data), "--sensitive", "sex", "--target", "y", "--json"]
    repair = ["repair", str(file), *columns, "--target-ks", "0.3", "--quick", "-o", str(out)]
    run = CliRunner().invoke(main, repair)
    assert run.exit_code in (0, 1), run.output
    run = CliRunner().invoke(main, ["audit", str(out), *columns])
    assert json.loads(run.stdout)["rows"] == len(gaps)
    run = CliRunner().invoke(main, ["audit", str(out), *columns, "--drop-missing"])
    assert json.loads(run.stdout)["rows"] == len(gaps.dropna())


def test_categories_of_catboost_are_text_or_whole_numbers():
    job, table = RNG.integers(0, 3, len(X)), TABLE.assign(job=RNG.integers(0, 3, len(X)))
    quiet = {"verbose": 0, "thread_count": 1, "allow_writing_files": False}
    model = catboost.CatBoostRegressor(iterations=9, cat_features=["job"], **quiet).fit(table, Y + table["job"])
    adapter = adapt(bytes(model._serialize_model()))
    np.testing.assert_array_equal(adapter.predict(table.astype({"job": float})), model.predict(table))
    with pytest.raises(InputError, match="column 'job' holds categories for CatBoost, and some are missing"):
        adapter.predict(table.assign(job=np.where(job == 1, np.nan, job)))


def test_other_bytes_are_no_trees(tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    for source in (b"", b"\x08\x07", b'{"a": 1}', tmp_path, tmp_path / "none", tmp_path / "empty"):
        assert tree_format(source) is None


def test_categories_are_read_from_text_and_early_stopping_from_a_file(tmp_path):
    pytest.importorskip("xgboost", minversion="3.1", reason="older ones store no categories")
    jobs = np.array(["cook", "clerk", "guard"])[RNG.integers(0, 3, len(X))]
    text, table = TABLE.assign(job=jobs), TABLE.assign(job=pd.Categorical(jobs))
    y = Y + (jobs == "cook")
    stopped = xgboost.XGBRegressor(n_estimators=200, early_stopping_rounds=2, enable_categorical=True, n_jobs=1)
    stopped.fit(table[:500], y[:500], eval_set=[(table[500:], y[500:])], verbose=False)
    stopped.save_model(tmp_path / "model.ubj")
    trees = lightgbm.LGBMRegressor(n_estimators=9, n_jobs=1, verbose=-1).fit(table, y)
    trees.booster_.save_model(tmp_path / "model.txt")
    few = text[jobs != "clerk"]  # whose other categories would be numbered 0 and 1
    for model, name in ((stopped, "model.ubj"), (trees, "model.txt")):
        np.testing.assert_allclose(
            adapt(tmp_path / name).predict(few), model.predict(table)[jobs != "clerk"], atol=1e-5
        )
        fair = ESVDFair(tmp_path / name, target_ks=0.2, effort=Effort.quick()).fit(text, y, sensitive_features=GROUP)
        again = tmp_path / f"fair-{name}"
        again.write_bytes(fair.estimator_)
        loaded = (
            xgboost.XGBRegressor(enable_categorical=True) if model is stopped else lightgbm.Booster(model_file=again)
        )
        if model is stopped:
            loaded.load_model(again)
        np.testing.assert_allclose(loaded.predict(table), fair.predict(text), atol=1e-5)
