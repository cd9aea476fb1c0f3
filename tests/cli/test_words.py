import pytest

from esvdfair.cli._words import in_options


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("no candidate meets target_ks=0.1; took it. See curve_ for what can be reached.",
         "no candidate meets --target-ks 0.1; took it. `esvdfair curve` shows what can be reached."),
        ("layer='MatMul' with method='parity'; or use method='exact' or 'paper'.",
         "--layer 'MatMul' with --method parity; or use --method exact or paper."),
        ("Say which is the prediction: output=name.", "Say which is the prediction: --output NAME."),
        ("Select another output with output=, or export", "Select another output with --output NAME, or export"),
        ("Pass validation= and target_ks for a milder repair.",
         "Give --validation FILE and --target-ks for a milder repair."),
        ("fewer rows than min_rows=10: 'a' has 3", "fewer rows than --min-rows 10: 'a' has 3"),
        ("X has 2 columns ('a', 'b'); the model takes 'a', by name. Pass these columns alone, or an array with the "
         "columns in that order.", "the table has 2 columns ('a', 'b'); the model takes 'a', by name. Name them: "
         "--features A,B,C"),
        ("sensitive_features has groups ['c'] that were not in fit", "the sensitive column has groups ['c'] that were "
         "not in fit"),
        ("on\n two  lines", "on two lines"),
    ],
)  # fmt: skip
def test_options_are_called_as_they_are_typed(message, said):
    assert in_options(message) == said


@pytest.mark.parametrize(
    "message",
    [
        "'runs/method='exact'/target_ks=0.1.csv' has no column 'sensitive_features has'.",
        "there is no file 'target_ks=0.1.csv'.",
        "the model has no output 'z'",
    ],
)
def test_names_of_files_and_columns_stay(message):
    assert in_options(message) == message
