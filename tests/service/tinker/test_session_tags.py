"""Hints by TINKER_TAGS, and names."""

from __future__ import annotations

import pytest

from rlmux.core.errors import UserError
from rlmux.core.model import Urgency
from rlmux.service.tinker.names import TinkerPath, checked_name
from rlmux.service.tinker.session_tags import Hints, read_tags


def test_tags_of_others_are_left_alone_and_ours_are_read():
    assert read_tags(["run:7", "rlmux.slo=1.3", "rlmux.seed=7"]) == Hints(slo=1.3, seed=7)
    assert read_tags(["rlmux.priority=urgent"]) == Hints(urgency=Urgency.URGENT)


@pytest.mark.parametrize(
    ("tag", "text"),
    [
        ("rlmux.prio=high", "accepted: rlmux.slo=..., rlmux.seed=..., rlmux.priority=..."),
        ("rlmux.priority=high", "accepted: urgent, normal, background"),
        ("rlmux.slo=0.5", "accepted: a number, 1 or more"),
        ("rlmux.slo=x", "accepted: a number, 1 or more"),
        ("rlmux.seed=-1", "accepted: a whole number below"),
    ],
)
def test_a_hint_that_is_not_known_is_refused(tag, text):
    with pytest.raises(UserError, match=text):
        read_tags([tag])


def test_a_path_is_read_as_it_is_written():
    text = "tinker://s0-ab:train:0/weights/final"
    assert str(TinkerPath.parse(text)) == text


@pytest.mark.parametrize("text", ["s0/weights/x", "tinker://s0/x", "tinker://s0/other/x", "tinker://s0/weights/x/y"])
def test_a_text_that_is_no_path_is_refused(text):
    with pytest.raises(UserError, match="accepted: tinker://RUN/KIND/NAME"):
        TinkerPath.parse(text)


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "x" * 129])
def test_a_name_that_is_no_folder_is_refused(name):
    with pytest.raises(UserError, match="accepted: 1 to 128 letters"):
        checked_name(name)
