"""A thread that a server cannot be without: its death stops the run in a line, and the run can be resumed."""

from __future__ import annotations

import pytest
from tests.waiting import until

from rlmux.core.errors import StorageError, ThreadDiedError
from rlmux.core.model import PipelineId
from rlmux.policies import make_policy
from rlmux.report.log import LogReader
from rlmux.runtime.model_host import ModelHost
from rlmux.runtime.run import RunOptions, resume_pipelines, run_pipelines
from rlmux.runtime.supervised import SupervisedThread


def dead(error: BaseException) -> SupervisedThread:
    def serve() -> None:
        raise error

    thread = SupervisedThread(serve, "models")
    thread.start()
    thread.join()
    return thread


def test_a_thread_that_ended_by_itself_is_no_failure():
    thread = SupervisedThread(lambda: None, "models")
    thread.start()
    thread.join()
    thread.check()


def test_the_death_of_a_thread_is_printed_and_raised_where_it_is_looked_for(capsys):
    thread = dead(KeyError("a"))
    with pytest.raises(ThreadDiedError, match="thread models ended: KeyError: 'a'"):
        thread.check()
    assert "Traceback" in capsys.readouterr().err
    with pytest.raises(StorageError, match=r"thread models ended: OSError: .*No space left"):
        dead(OSError(28, "No space left on device")).check()


def test_a_run_whose_thread_has_died_stops_in_a_line_and_can_be_resumed(real, tmp_path):
    thread = dead(KeyError("a"))

    class Checks:
        def update(self, *_: object) -> None:
            thread.check()

    submissions, policy = [real.submission("a", num_steps=2)], make_policy("fifo")
    with pytest.raises(ThreadDiedError, match=r"thread models ended: KeyError: 'a'; .*resume with: rlmux") as caught:
        run_pipelines(real.cluster(), submissions, policy, tmp_path / "run", RunOptions(listeners=[Checks()]), spec={})
    assert "\n" not in str(caught.value)
    with LogReader(tmp_path / "run") as reader:
        assert [entry.value["text"] for entry in reader.entries() if entry.type == "defect"] == [
            "thread models ended: KeyError: 'a'"
        ]
    assert resume_pipelines(real.cluster(), submissions, policy, tmp_path / "run").is_complete


def test_an_error_in_the_thread_of_a_servers_models_is_seen():
    class NoPlace:
        def wait(self, limit_s: float) -> list[object]:
            return []

        def close(self) -> None:
            pass

    host = ModelHost(NoPlace(), None, None, wake=lambda: None)  # type: ignore[arg-type]
    host.start()
    host.finish(PipelineId("a"))  # there is no front that could be told
    until(lambda: not host.thread.is_alive(), "the end of the thread")
    with pytest.raises(ThreadDiedError, match="thread models ended: AttributeError"):
        host.thread.check()
