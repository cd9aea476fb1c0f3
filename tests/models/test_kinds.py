"""Every model of the tables in the docs is repaired, every refusal is one, and the tables are what the list gives.

Those of Keras run in `test_keras`, in a process of its own.
"""

import pytest

from tests.models import kinds

NAMES = [kind.name for kind in kinds.KINDS]
HERE = [kind for kind in kinds.KINDS if kind.needs != "keras"]

REFUSED = [refusal for refusal in kinds.REFUSALS if refusal.needs != "keras"]


@pytest.mark.filterwarnings("ignore:Class PassiveAggressiveRegressor is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", HERE, ids=[kind.name for kind in HERE])
def test_it_is_repaired_and_of_the_same_type(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # trainers write logs
    kinds.check(kind)


@pytest.mark.parametrize("refusal", REFUSED, ids=[refusal.name for refusal in REFUSED])
def test_it_is_refused_with_the_next_step(refusal):
    kinds.check_refusal(refusal)


def test_the_table_in_the_docs_is_what_the_list_gives():
    assert len(set(NAMES)) == len(NAMES) > 40
    assert kinds.PAGE.read_text(encoding="utf-8") == kinds.page(), "run python -m tests.models.kinds"
