"""The live display follows events and orders, and forgets what ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlmux.cli.live import Live
from rlmux.config import load_spec
from rlmux.core.actions import ReportPolicyFault, RunStage
from rlmux.core.events import ChunkFinished, PipelineFailed, PipelineRestarted, StageFinished, WorkerLost
from rlmux.core.model import DeviceId, FailureCause, OrderId, PipelineId, Stage
from rlmux.log.notes import DeterminismNote, RetriedNote, StepNote

ROLLOUT, TRAIN = DeviceId("rollout", 0, 0), DeviceId("train", 0, 0)
A = PipelineId("a")


@pytest.fixture
def live(folder: Path) -> Live:
    return Live(load_spec("small.yaml"), is_quiet=False)


def generate(order: int, step: int = 1) -> RunStage:
    return RunStage(
        order=OrderId(order), pipeline=A, step=step, stage=Stage.GENERATE, devices=(ROLLOUT,), weight_version=0
    )


def step(number: int, reward: float) -> StepNote:
    metrics = {"reward_mean": reward, "tokens": 50}
    return StepNote(pipeline=A, step=number, metrics=metrics)


def drawn(live: Live) -> str:
    from rich.console import Console

    console = Console(width=120)
    with console.capture() as capture:
        console.print(live.tables())
    return capture.get()


def test_a_device_shows_who_holds_it_until_the_order_ends(live):
    live.update(1.0, [], [generate(1)], [])
    assert "a: generate 1" in drawn(live)
    live.update(1.5, [ChunkFinished(time_s=1.5, order=OrderId(1), num_active=3, num_waiting=2)], [], [])
    assert "generate 1, 5 open" in drawn(live)
    live.update(2.0, [StageFinished(time_s=2.0, order=OrderId(1), seconds=1.0)], [], [])
    assert "a: generate" not in drawn(live)


@pytest.mark.parametrize(
    "event",
    [
        PipelineFailed(time_s=2.0, pipeline=A, reason="NaN"),
        PipelineRestarted(time_s=2.0, pipeline=A, restored_step=3),
        WorkerLost(time_s=2.0, pipeline=A, device=ROLLOUT),
    ],
)
def test_orders_that_end_with_their_worker_let_go_of_the_device(live, event):
    live.update(1.0, [], [generate(1)], [])
    live.update(2.0, [event], [], [])
    assert "a: generate" not in drawn(live)


def test_steps_show_their_reward_and_speed(live, capsys):
    live.update(2.0, [], [], [step(1, 0.25)])
    live.update(7.0, [], [], [step(2, 0.5)])
    assert "0.250 → 0.500" in drawn(live)
    assert "done" in drawn(live)
    lines = capsys.readouterr().err.splitlines()
    assert lines[1] == "    7.0 s  a: step 2/2  reward 0.500  10 tokens/s"


def test_quiet_is_quiet(folder, capsys):
    quiet = Live(load_spec("small.yaml"), is_quiet=True)
    with quiet as live:
        live.update(2.0, [PipelineFailed(time_s=2.0, pipeline=A, reason="NaN")], [], [step(1, 0.25)])
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_a_decision_of_the_policy_that_failed_is_a_line(live, capsys):
    live.update(1.0, [], [ReportPolicyFault(policy="own:Policy", method="place", error="KeyError: 1")], [])
    line = "rlmux: policy own:Policy failed in place, and the plain order of work stands in: KeyError: 1"
    assert capsys.readouterr().err.splitlines() == [line]


def test_a_try_is_a_line_with_the_failure_before(live, capsys):
    note = RetriedNote(
        pipeline=PipelineId("a"), number=2, of=3, by_rule=True, cause=FailureCause.LOST_WORKER, reason="it is gone",
        failed_s=1.0,
    )  # fmt: skip
    live.update(2.0, (), (), [note])
    assert "a: try 2 of 3, after: it is gone" in capsys.readouterr().err


def test_the_promise_of_a_server_comes_with_what_a_version_costs(live, capsys):
    server = {"name": "vllm", "version": "0.24.0", "reloads": True, "load_s": 0.031}
    server |= {"frees_memory": True, "freed_bytes": 12.3e9}
    note = DeterminismNote(pipeline=A, promise="replayable", checks={"batches": False}, server=server)
    live.update(1.0, [], [], [note])
    measured = "vllm 0.24.0: a version takes 0.03 s, asleep it frees 12.3 GB"
    line = f"{A}: promise replayable (other bits: batches); {measured}"
    assert capsys.readouterr().err.splitlines() == [line]


def test_a_device_of_several_gpus_says_so(folder):
    (folder / "wide.yaml").write_text(
        "cluster: {pools: {rollout: {devices: 1, gpus_per_device: 4}, train: {devices: 1}}}\n"
        "pipelines: [{name: a, task: sort, rollout: {engine: {name: vllm, python: python}}}]"
    )
    live = Live(load_spec("wide.yaml"), is_quiet=False)
    live.update(1.0, [], [generate(1)], [])
    rows = {line.split()[0]: line for line in drawn(live).splitlines() if line.startswith(("rollout-", "train-"))}
    assert rows["rollout-0.0"].split("  ")[0] == "rollout-0.0 (4 GPUs)"
    assert "a: generate 1" in rows["rollout-0.0"]
    assert "GPUs" not in rows["train-0.0"]
