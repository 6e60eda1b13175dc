"""The broker's wire: what is a message, and what is answered with an error."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmux.broker.wire import MAX_LINE_BYTES, MESSAGES, WireError, read_message

ASK = {"t": "ask", "id": 1, "pools": ["gpu0"], "phase": "train"}


def line(**fields):
    return json.dumps(fields).encode()


def test_a_message_is_read_with_its_fields_and_without_those_that_are_unknown():
    assert read_message(line(**ASK, units=3, colour="red")) == {**ASK, "units": 3}


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b"", "not_a_message"),
        (b"[1]", "not_a_message"),
        (b"{" * 2000, "not_a_message"),
        (b"[" * 20_000, "not_a_message"),
        (b"x" * (MAX_LINE_BYTES + 1), "too_long"),
        (line(t="shutdown"), "unknown"),
        (line(t=["ask"]), "unknown"),
        (line(t="ask", id=1, pools=["gpu0"]), "incomplete"),
        (line(**{**ASK, "id": True}), "wrong_value"),
        (line(**{**ASK, "id": -1}), "wrong_value"),
        (line(**{**ASK, "pools": [["gpu0"]]}), "wrong_value"),
        (line(**{**ASK, "pools": "gpu0"}), "wrong_value"),
        (line(**ASK, need_bytes={"gpu0": {"a": 1}}), "wrong_value"),
        (line(t="workers", workers=["gpu-7"]), "wrong_value"),
        (line(t="workers", workers=["gpu-7/12", 3]), "wrong_value"),
        (b'{"t":"done","fence":1,"used_s":NaN}', "wrong_value"),
        (b'{"t":"done","fence":1,"used_s":1e999}', "wrong_value"),
    ],
)
def test_what_is_no_message_is_refused_with_a_code_and_what_is_accepted(text, code):
    with pytest.raises(WireError) as refused:
        read_message(text)
    assert refused.value.code == code
    assert "accepted" in str(refused.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(sorted(MESSAGES)), st.dictionaries(st.sampled_from(sorted(MESSAGES["hello"][1])), JSON), JSON)
def test_no_line_raises_anything_but_a_wire_error(kind, fields, number):
    try:
        read = read_message(json.dumps({**fields, "t": kind, "id": number, "fence": number}).encode())
    except WireError:
        return
    assert read["t"] == kind


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_but_a_wire_error(data):
    with pytest.raises(WireError):
        read_message(b"\x00" + data)
