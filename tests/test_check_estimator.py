"""scikit-learn's own checks, over a subclass that derives the attribute from a column."""

import numpy as np
import pytest
from sklearn.neural_network import MLPRegressor
from sklearn.utils.estimator_checks import parametrize_with_checks

from esvdfair import ESVDFair


class Derived(ESVDFair):
    """Groups are the odd and even ranks of the first column: the checks know no sensitive attribute."""

    def fit(self, X, y=None, *, sample_weight=None):
        dense = X.toarray() if hasattr(X, "toarray") else np.asarray(X)
        try:
            column = dense.real.astype(float)[:, 0]
        except (
            AttributeError,
            TypeError,
            ValueError,
            IndexError,
        ):  # bad input, which the estimator must explain by itself
            column = np.arange(dense.shape[0] if dense.ndim else 0)
        groups = np.argsort(np.argsort(column, kind="stable"), kind="stable") % 2
        return super().fit(X, y, sensitive_features=groups, sample_weight=sample_weight)


IMPOSSIBLE = {
    "check_sample_weight_equivalence_on_dense_data": "rows are held out by their index, and repeating a row shifts it",
    "check_sample_weight_equivalence_on_sparse_data": "rows are held out by their index, and repeating a row shifts it",
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # checks fit 20 rows with 5 iterations; convergence is not the point
@parametrize_with_checks(
    [Derived(MLPRegressor(hidden_layer_sizes=(16,), max_iter=200, random_state=0), targets="labels")],
    expected_failed_checks=lambda estimator: IMPOSSIBLE,
)
def test_scikit_learn_checks(estimator, check):
    check(estimator)
