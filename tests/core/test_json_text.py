"""JSON that others wrote is a value or one line."""

from __future__ import annotations

import json

import pytest

from rlmux.core.json_text import MAX_LEVELS, parse_json


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[" * 3000 + "]" * 3000, "lists and objects are nested too deeply; accepted: 100 levels"),
        ('{"a":' * 101 + "1" + "}" * 101, "lists and objects are nested too deeply; accepted: 100 levels"),
        ('{"a": -' + "9" * 5000 + "}", "an integer has more than 4,300 digits; accepted: fewer"),
        ("{", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
    ],
)
@pytest.mark.parametrize("is_bytes", [False, True])
def test_a_text_that_no_code_can_read_is_a_value_error(text: str, complaint: str, is_bytes: bool) -> None:
    with pytest.raises(ValueError, match=r"\w") as caught:
        parse_json(text.encode() if is_bytes else text)
    assert str(caught.value) == complaint


def test_what_is_within_the_limits_is_read_as_by_json() -> None:
    for text in ('{"a": [1, 2.5, null], "b": "["}', "[" * MAX_LEVELS + "]" * MAX_LEVELS, "[]" + " " * 9, "9" * 4300):
        assert parse_json(text) == json.loads(text)
    wide = json.dumps([[]] * 1000)
    assert parse_json(wide) == json.loads(wide)


def test_bytes_that_are_no_utf_8_are_a_value_error() -> None:
    with pytest.raises(UnicodeDecodeError):
        parse_json(b'"\xff"')
