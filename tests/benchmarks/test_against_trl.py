"""The comparison with TRL: rlmux's side is really run, and what is missing is said."""

from __future__ import annotations

import against_trl
import pytest
from against_trl import CASES, Case, Run, make_checkpoint, require_trl, summary, train_with_rlmux

TINY = Case(
    model={"hidden_size": 16, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate_size": 32},
    task={"digits": 3},
    prompts_per_step=2,
    group_size=2,
    max_new_tokens=4,
    max_prompt_tokens=8,
    slots=4,
    sft_updates=1,
)


@pytest.mark.slow
def test_a_run_of_rlmux_is_timed_by_its_own_log(tmp_path):
    make_checkpoint(TINY, tmp_path / "checkpoint")
    run = train_with_rlmux(TINY, tmp_path / "checkpoint", against_trl.SKIPPED_STEPS + 2)
    assert len(run.step_s) == len(run.rollout_s) == 2
    assert 4 <= run.tokens <= 16
    assert set(run.parts_s) == {"generate", "reward", "update", "publish"}, "one update: no old log-probs"


@pytest.mark.parametrize("python", ["/bin/false", "/no/such/python"])
def test_where_trl_is_missing_the_command_that_installs_it_is_said(python):
    with pytest.raises(SystemExit, match=r"no TRL there.*pip install -e '.\[train,trl\]'"):
        require_trl(python)


def test_steps_of_all_rounds_count_alike():
    runs = [
        Run(step_s=[1.0, 2.0], rollout_s=[0.5, 0.5], tokens=10),
        Run(step_s=[2.0, 9.0], rollout_s=[0.5, 0.7], tokens=30),
    ]
    found = summary(runs)
    assert (found["step_s"], found["step_s_range"], found["rollout_s"]) == (2.0, [1.0, 9.0], 0.5)
    assert found["token_s"] == pytest.approx(3.5 / 20)


def test_both_micro_batch_sizes_of_trl_divide_a_step():
    assert all(case.num_trajectories % case.micro_batch_size == 0 for case in CASES.values())
