"""A wait that fails says for what, and what it saw; and what tests start can be interrupted."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import until


def test_the_first_true_answer_is_returned():
    answers = iter([0, "", None, "there"])
    assert until(lambda: next(answers), "an answer", poll_s=0.0) == "there"


@pytest.mark.parametrize(
    ("options", "seen"), [({}, "seen last: 0"), ({"seen": lambda: "3 of 4 steps"}, "seen last: 3 of 4 steps")]
)
def test_what_never_comes_is_named_with_what_was_seen_last(options, seen):
    with pytest.raises(AssertionError, match=f"waited 0.01 s for a fourth step\n{seen}"):
        until(lambda: 0, "a fourth step", limit_s=0.01, poll_s=0.001, **options)


def test_an_error_that_is_an_answer_is_seen_last_and_any_other_is_raised():
    def ask() -> None:
        raise ConnectionError("nothing listens")

    with pytest.raises(AssertionError, match="seen last: ConnectionError: nothing listens"):
        until(ask, "an answer", limit_s=0.01, poll_s=0.001, not_yet=(OSError,))
    with pytest.raises(ConnectionError):
        until(ask, "an answer")


def test_an_ended_process_ends_the_wait_and_is_shown():
    words = [sys.executable, "-c", "import sys; print('out', flush=True); sys.exit('no such file')"]
    with (
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
        pytest.raises(AssertionError) as caught,
    ):
        until(lambda: False, "a step", process=process)
    told = str(caught.value)
    assert "its process ended before a step" in told
    assert "its exit code: 1\nend of its stdout: out\n\nend of its stderr: no such file" in told


def test_what_a_process_does_last_counts(tmp_path):
    made = tmp_path / "made"
    with subprocess.Popen([sys.executable, "-c", f"open({str(made)!r}, 'w')"]) as process:
        process.wait()
        assert until(made.exists, "a file", process=process)


TESTS = """
import subprocess, sys
from tests import signals
signals.hear()
child = "import signal; print(signal.getsignal(signal.SIGHUP).name, signal.getsignal(signal.SIGINT).__name__)"
subprocess.run([sys.executable, "-c", child], check=True)
"""


def test_what_tests_under_nohup_start_hears_hang_ups_and_interrupts():
    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    root = Path(__file__).parent.parent
    words = [sys.executable, "-c", TESTS]
    done = subprocess.run(words, preexec_fn=ignore, cwd=root, capture_output=True, text=True)
    assert done.stdout.split() == ["SIG_DFL", "default_int_handler"], done.stderr
