"""Explanation and report, whichever way an ESVDFair came to be."""

import numpy as np
import pandas as pd
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPRegressor

from esvdfair import ESVDFair
from esvdfair.explain import explain_directions
from esvdfair.problem import Effort
from esvdfair.report import render_report
from esvdfair.text import number

# Untrained networks do for what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:the model predicts the labels worse than a constant")

ROWS = 400


def arrays(case, **options):
    return ESVDFair(case.model, **options).fit(case.X, case.y, sensitive_features=case.groups)


def unlabelled(case, **options):
    return ESVDFair(case.model, **options).fit(case.X, sensitive_features=case.groups)


def validated(case, **options):
    half = ROWS // 2
    validation = case.X[half:], case.y[half:], case.groups[half:]
    fair = ESVDFair(case.model, **options)
    return fair.fit(case.X[:half], case.y[:half], sensitive_features=case.groups[:half], validation=validation)


def streamed(case, **options):
    def batches():
        for part in np.array_split(np.arange(ROWS), 3):
            yield case.X.iloc[part], case.y[part], case.groups[part]

    return ESVDFair(case.model, **options).fit(batches)


def unfitted(case, **options):
    learner = MLPRegressor(hidden_layer_sizes=(12,), solver="lbfgs", max_iter=30, tol=1.0, random_state=0)
    return ESVDFair(learner, **options).fit(case.X, case.y, sensitive_features=case.groups)


def no_rows_to_hold_out(case, **options):
    return ESVDFair(case.model, validation_fraction=0.0, **options).fit(case.X, case.y, sensitive_features=case.groups)


class Few:
    def __init__(self, case):
        self.model, self.X, self.y = case.model, case.X[:ROWS], case.y[:ROWS]
        self.groups = case.groups.to_numpy()[:ROWS]


SAID = {
    arrays: "held-out validation rows",
    unlabelled: "held-out validation rows",
    validated: "rows given here",
    streamed: "held-out validation rows",
    unfitted: "held-out validation rows",
    no_rows_to_hold_out: "training rows, so results on new data",
}


CASES = [(arrays, "parity"), (arrays, "exact"), (unlabelled, "exact"), (validated, "parity"), (streamed, "exact"),
         (unfitted, "parity"), (no_rows_to_hold_out, "exact")]  # fmt: skip


@pytest.mark.parametrize(("way", "method"), CASES, ids=[f"{way.__name__} {method}" for way, method in CASES])
@pytest.mark.filterwarnings("ignore:The repaired model predicts no better than a constant")
def test_explained_and_reported(case, way, method):
    few = Few(case)
    fair = way(few, method=method, effort=Effort.quick())
    found = explain_directions(fair, few.X, sensitive_features=few.groups)
    assert found.after == "repaired model"
    if method == "parity":  # it edits the last layer alone
        assert found.mean_gap_after == pytest.approx(found.mean_gap_before)
    else:
        assert found.mean_gap_after < found.mean_gap_before
    page = render_report(fair, few.X, few.y, sensitive_features=few.groups)
    assert SAID[way] in page
    assert "NaN" not in page
    assert fair.summary_["error_against"] == ("predictions" if "unlabelled" in way.__name__ else "labels")


def test_a_model_that_is_perfect_on_its_labels_has_labels(case):
    few = Few(case)
    few.y = few.model.predict(few.X)
    page = render_report(
        arrays(few, method="parity", effort=Effort.quick()), few.X, few.y, sensitive_features=few.groups
    )
    assert "mean squared error" in page
    assert "There were no labels" not in page
    assert "of the explained variance (R² 1.000 to 0." in page


def test_a_model_of_several_inputs(case):
    """Inputs are named by their part and column; rows that neither fitted nor chose are told apart all the same."""
    torch = pytest.importorskip("torch")

    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.work, self.home, self.leave = torch.nn.Linear(3, 6), torch.nn.Linear(1, 2), torch.nn.Linear(8, 1)

        def forward(self, work, home):
            return self.leave(torch.relu(torch.cat([self.work(work), self.home(home)], dim=1)))

    torch.manual_seed(0)
    X, y, groups = case.X.to_numpy(np.float32), case.y, case.groups

    def part(rows):
        return {"work": X[rows, :3], "home": pd.DataFrame(X[rows, 3:], columns=["rent"])}, y[rows], groups[rows]

    x_fit, y_fit, of_fit = part(slice(0, 350))
    fair = ESVDFair(Two(), method="parity", effort=Effort.quick(), targets="labels")
    fair.fit(x_fit, y_fit, sensitive_features=of_fit, validation=part(slice(350, 450)))
    page = render_report(fair, x_fit, y_fit, sensitive_features=of_fit, test=part(slice(450, 600)))
    for said in ("work[0]", "work[2]", "home[rent]", "150 rows of test data", "Layer by layer"):
        assert said in page
    assert "Not available" not in page


def test_labels_that_are_words():
    rng = np.random.default_rng(0)
    groups = np.arange(400) % 2
    X = rng.normal(size=(400, 3)) + groups[:, None] * [1, 0, 0]
    y = np.where(X.sum(axis=1) + rng.normal(size=400) > 1, "yes", "no")
    fair = ESVDFair(LogisticRegression().fit(X, y), method="parity", effort=Effort.quick())
    fair.fit(X, y, sensitive_features=groups)
    page = render_report(fair, X, y, sensitive_features=groups)
    assert "There were no labels" not in page
    assert number(fair.summary_["mse_after"]) in page
    assert "KS if edited" in page  # the layers are scanned with the words, too
    tested = render_report(fair, X, y, sensitive_features=groups, test=(X, y, groups))
    assert "400 rows of test data" in tested
