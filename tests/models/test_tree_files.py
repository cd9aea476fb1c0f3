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


def test_other_bytes_are_no_trees(tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    for source in (b"", b"\x08\x07", b'{"a": 1}', tmp_path, tmp_path / "none", tmp_path / "empty"):
        assert tree_format(source) is None
