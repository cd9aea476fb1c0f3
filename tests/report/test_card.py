import pytest
from sklearn.exceptions import NotFittedError

from esvdfair import ESVDFair
from esvdfair.report import model_card

HOSTILE = "a|b\n# <script>x</script> [c](d) `e`"


def test_the_sections_of_a_model_card(fair):
    card = model_card(fair, name="pay", hashes={"pay.onnx": "0" * 64})
    headings = [line for line in card.splitlines() if line.startswith("#")]
    assert headings == [
        "# Model Card for pay", "## Model Details", "## Uses", "### Out-of-Scope Use",
        "## Bias, Risks, and Limitations", "## Training Details", "## Evaluation", "### Results",
        "## Technical Specifications",
    ]  # fmt: skip
    assert f"| KS distance | {fair.summary_['ks_before']:.3f} | {fair.summary_['ks_after']:.3f} |" in card
    assert "does not ask for the group" in card


def test_names_are_text_and_facts_are_yaml(fair):
    yaml = pytest.importorskip("yaml")
    card = model_card(
        fair, name=HOSTILE, base=HOSTILE, data={"Fitted on": HOSTILE}, inputs=[HOSTILE], attribute=HOSTILE,
        predicts=HOSTILE, unit=HOSTILE, hashes={HOSTILE: "0"},
    )  # fmt: skip
    _, facts, text = card.split("---\n", 2)
    assert yaml.safe_load(facts)["model-index"][0]["name"] == HOSTILE
    assert "<script>" not in text.replace("\\<script\\>", "")
    assert len([line for line in text.splitlines() if line.startswith("# ")]) == 1
    lines = [line.replace("\\|", "") for line in text.splitlines() if line.startswith("| ")]
    assert {line.count("|") for line in lines} == {3, 5}  # files, and before and after


def test_a_cell_that_starts_with_a_backtick_is_escaped(fair):
    card = model_card(fair, name="pay", hashes={"`a` <b>|": "0" * 64})
    assert rf"| \`a\` \<b\>\| | {'0' * 64} |" in card


def test_a_repair_that_was_not_made(case):
    with pytest.raises(NotFittedError):
        model_card(ESVDFair(case.model), name="x")
