"""Every model of the table in the docs is repaired, every refusal is one, and the table is what the list gives."""

import pickle
import warnings

import numpy as np
import pytest

from esvdfair import Effort, ESVDFair, ESVDFairWarning, ks_distance
from esvdfair.models import adapt, fingerprint
from tests.models import kinds

NAMES = [kind.name for kind in kinds.KINDS]


@pytest.mark.filterwarnings("ignore:Class PassiveAggressiveRegressor is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", kinds.KINDS, ids=NAMES)
def test_it_is_repaired_and_of_the_same_type(kind):
    X, y, group = kinds.data(kind.y)
    model = kinds.make(kind, X, y)
    content = fingerprint(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ESVDFairWarning)  # trees say that their training rows look too good
        fair = ESVDFair(model, target_ks=0.15, effort=Effort.quick()).fit(X, y, sensitive_features=group)
    assert type(fair.estimator_) is type(model)
    assert type(model).__name__ == kind.back
    assert fingerprint(model) == content
    assert [edit.layer for edit in fair.edits_] == [kind.changed]
    fresh, _, groups = kinds.data(kind.y, rows=4000, seed=1)
    after = fair.predict(fresh)
    assert ks_distance(after, sensitive_features=groups) < 0.16
    assert ks_distance(adapt(model).predict(fresh), sensitive_features=groups) > 0.18
    np.testing.assert_allclose(adapt(fair.estimator_).predict(fresh), after, rtol=1e-5, atol=1e-5)
    assert type(pickle.loads(pickle.dumps(fair.estimator_))) is type(model)


@pytest.mark.parametrize("refusal", kinds.REFUSALS, ids=[refusal.name for refusal in kinds.REFUSALS])
def test_it_is_refused_with_the_next_step(refusal):
    X, y, _ = kinds.data(refusal.y)
    model = kinds.make(refusal, X, y)
    with pytest.raises((TypeError, ValueError)) as error:
        adapt(model).layers(X)
    assert refusal.next_step in str(error.value)


def test_the_table_in_the_docs_is_what_the_list_gives():
    assert len(set(NAMES)) == len(NAMES) > 40
    assert kinds.PAGE.read_text(encoding="utf-8") == kinds.page(), "run python -m tests.models.kinds"
