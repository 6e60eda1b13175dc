"""A thread that a server cannot be without: its death stops the run in a line, and the run can be resumed."""

from __future__ import annotations

import pytest

from rlmux.core.errors import StorageError, ThreadDiedError
from rlmux.log.run_log import LogReader
from rlmux.policies import make_policy
from rlmux.runtime.control.supervised_thread import SupervisedThread
from rlmux.runtime.run import RunOptions, resume_pipelines, run_pipelines


def dead(error: BaseException) -> SupervisedThread:
    def serve() -> None:
        raise error

    thread = SupervisedThread(serve, "permits")
    thread.start()
    thread.join()
    return thread


def test_a_thread_that_ended_by_itself_is_no_failure():
    thread = SupervisedThread(lambda: None, "permits")
    thread.start()
    thread.join()
    thread.check()


def test_the_death_of_a_thread_is_printed_and_raised_where_it_is_looked_for(capsys):
    thread = dead(KeyError("a"))
    with pytest.raises(ThreadDiedError, match="thread permits ended: KeyError: 'a'"):
        thread.check()
    assert "Traceback" in capsys.readouterr().err
    with pytest.raises(StorageError, match=r"thread permits ended: OSError: .*No space left"):
        dead(OSError(28, "No space left on device")).check()


def test_a_run_whose_thread_has_died_stops_in_a_line_and_can_be_resumed(real, tmp_path):
    thread = dead(KeyError("a"))

    class Checks:
        def update(self, *_: object) -> None:
            thread.check()

    submissions, policy = [real.submission("a", num_steps=2)], make_policy("fifo")
    with pytest.raises(ThreadDiedError, match=r"thread permits ended: KeyError: 'a'; .*resume with: rlmux") as caught:
        run_pipelines(real.cluster(), submissions, policy, tmp_path / "run", RunOptions(listeners=[Checks()]), spec={})
    assert "\n" not in str(caught.value)
    with LogReader(tmp_path / "run") as reader:
        assert [entry.value["text"] for entry in reader.entries() if entry.type == "defect"] == [
            "thread permits ended: KeyError: 'a'"
        ]
    assert resume_pipelines(real.cluster(), submissions, policy, tmp_path / "run").is_complete
