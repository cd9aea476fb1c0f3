import numpy as np
import pandas as pd
import pytest
from sklearn.neural_network import MLPRegressor

from esvdfair import ESVDFair
from esvdfair.problem import Effort
from esvdfair.report import render_report

COLUMNS = ["<script>document.title='run'</script>", "</script><!--", "line\u2028end", "\"q\" onload='z'"]
GROUPS = ("<img src=x onerror=document.title='run'>", "b & c")
ATTRIBUTE = "<b>sex</b>"


class Case:
    """A repaired model and its rows, in which every name is hostile."""

    def __init__(self):
        rng = np.random.default_rng(0)
        codes = rng.integers(0, 2, 600)
        self.X = pd.DataFrame(rng.normal(size=(600, 4)) + codes[:, None] * [0.8, 0, 0, 0], columns=COLUMNS)
        self.y = (self.X.sum(axis=1) + 0.3 * rng.normal(size=600)).to_numpy()
        self.groups = pd.Series(np.array(GROUPS)[codes], name=ATTRIBUTE)
        self.model = MLPRegressor(hidden_layer_sizes=(12, 8), solver="lbfgs", max_iter=30, random_state=0, tol=1)
        self.model.fit(self.X, self.y)

    def repaired(self, **options):
        return ESVDFair(self.model, **options).fit(self.X, self.y, sensitive_features=self.groups)


@pytest.fixture(scope="session")
def case():
    return Case()


@pytest.fixture(scope="session")
def fair(case):
    return case.repaired(target_ks=0.16, effort=Effort.quick())


@pytest.fixture(scope="session")
def page(case, fair):
    command = ["repair", "</pre><script>document.title='run'</script>", "a b.csv"]
    return render_report(fair, case.X, case.y, sensitive_features=case.groups, command=command)
