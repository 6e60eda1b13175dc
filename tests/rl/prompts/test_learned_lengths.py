"""A prompt's expected length is the mean of its last answers; old prompts are forgotten first."""

from __future__ import annotations

import subprocess
import sys

from rlmux.rl.prompts import learned_lengths
from rlmux.rl.prompts.learned_lengths import LearnedLengths


def test_the_last_answers_count():
    lengths = LearnedLengths()
    assert lengths.expected((1, 2)) == 0
    lengths.learn({(1, 2): [10, 21], (3,): [4]})
    lengths.learn({(1, 2): [30, 50]})
    assert (lengths.expected((1, 2)), lengths.expected((3,))) == (40, 4)


def test_prompts_that_were_not_asked_for_long_are_forgotten(monkeypatch):
    monkeypatch.setattr(learned_lengths, "MAX_PROMPTS", 3)
    lengths = LearnedLengths()
    for prompt in range(5):
        lengths.learn({(prompt,): [7], (0,): [9]})
    assert [lengths.expected((prompt,)) for prompt in range(5)] == [9, 0, 0, 7, 7]


def test_a_prompts_key_is_the_same_in_every_process():
    there = subprocess.run([sys.executable, "-c", "print(hash((5, 900, 31)))"], capture_output=True, text=True).stdout
    assert int(there) == hash((5, 900, 31))
