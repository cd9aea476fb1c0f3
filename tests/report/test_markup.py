import json

import pytest

from esvdfair.report.markup import script_json, table, text


def test_json_in_a_script_cannot_leave_it():
    hostile = "</script><!--<script>&\u2028\u2029\ud800"
    written = script_json({"a": hostile})
    assert not set("<>&\u2028\u2029") & set(written)
    assert json.loads(written) == {"a": hostile}
    with pytest.raises(ValueError, match="JSON"):
        script_json([float("nan")])


def test_cells_captions_and_quotes_are_escaped():
    assert text("\"'<&") == "&quot;&#x27;&lt;&amp;"
    assert "<x" not in table(["<x1"], [["<x2"]], caption='<x3"')
