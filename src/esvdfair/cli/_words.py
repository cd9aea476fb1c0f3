"""Messages of the library in the words of the command line: ``layer=0`` there is ``--layer 0`` here."""

import re

# Pattern in a message of the library -> what the command line says, in this order.
_WORDS = {
    r"See curve_ for what": "`esvdfair curve` shows what",
    r"Pass validation=": "Give --validation FILE",
    r"output=(name)?(?=[.,])": "--output NAME",
    r"leave layer out": "leave --layer out",
    r"layer=(?=[-'\d])": "--layer ",
    r"method='(\w+)' or '(\w+)'": r"--method \1 or \2",
    r"method='(\w+)'": r"--method \1",
    r"min_rows=": "--min-rows ",
    r"target_ks=": "--target-ks ",
    r"and target_ks for": "and --target-ks for",
    r"X has (?=\d)": "the table has ",
    r"Pass these columns alone, or an array .* order\.": "Name them: --features A,B,C",
    r"sensitive_features (?=has|holds|takes)": "the sensitive column ",
    r"for example with pandas\.cut, or pass strings if": "or write words for the numbers if",
}
_PATTERNS = [(re.compile(rf"(?<![\w'/.-]){pattern}"), said) for pattern, said in _WORDS.items()]  # not in a file's name


def in_options(message: str) -> str:
    """A message on one line, with options as they are typed."""
    text = " ".join(message.split())
    for pattern, said in _PATTERNS:
        text = pattern.sub(said, text)
    return text
