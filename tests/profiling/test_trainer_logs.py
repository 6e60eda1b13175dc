"""Formats of logs, as their loggers write them.

Lines with numbers were written by the frameworks' own functions: verl 0.9.1, AReaL 1.0.4 (two columns, not four),
SkyRL 0.4.0. Prefixes, AReaL's lines before its table, verl's file and W&B's exports follow their sources by hand.
"""

from __future__ import annotations

import re

import pytest

from rlmux.core.errors import UserError
from rlmux.profiling.trainer_logs import read_log

VERL = """\
step:0 - val-core/x:0.5
step:12 - global_seqlen/mean:np.float64(812.5) - actor/loss:nan - timing_s/gen:83.12345678 - \
timing_s/update_actor:np.float64(41.0) - timing_s/step:150.0 - perf/total_num_tokens:1234567
"""
AREAL = """\
20260101-10:00:00.000 StatsLogger INFO: Epoch 1/1 Step 8/10 Train step 8/10 done.
20260101-10:00:00.001 StatsLogger INFO: Stats (1/1):
20260101-10:00:00.002 StatsLogger INFO:\x20
╒═══════════════════════════════════════════════════════════╤════════════╤═════════════════════════╤════════════╕
│ ppo_actor/update/version_stats/sample_staleness_theta_max │ 0.0000e+00 │ timeperf/train_step     │ 4.1000e+01 │
├───────────────────────────────────────────────────────────┼────────────┼─────────────────────────┼────────────┤
│ timeperf/rollout                                          │ 8.3123e+01 │ timeperf/update_weights │ 4.2500e+00 │
╘═══════════════════════════════════════════════════════════╧════════════╧═════════════════════════╧════════════╛
"""
SKYRL = """\
2026-01-01 10:00:00.000 | INFO     | skyrl.train.utils.tracking:log:189 - Step 3:\x20
{'loss/x': ['1.0000', '2.0000'],
 'timing/generate': '83.1235',
 'timing/sync_weights': '4.0000',
 'timing/train_critic_and_policy': '41.0000',
 'trainer/epoch': 0}
"""
FILE_LOGGER = '{"step":12,"data":{"timing_s/gen":83.1,"timing_s/update_actor":41.0,"actor/loss":null}}\n'
WANDB_CSV = "Step,run - timing_s/gen,run - timing_s/gen__MIN,run - timing_s/update_actor\n12,83.1,83.1,41.0\n13,,,40\n"
WANDB_JSON = '[{"_step": 12, "timing_s/gen": 83.1, "timing_s/update_actor": 41}, {"_step": 12, "perf/mfu": 0.4}]'


@pytest.fixture
def log(tmp_path):
    """Reads a text as a log."""

    def read(text: str):
        path = tmp_path / "a.log"
        path.write_text(text, encoding="utf-8")
        return read_log(path)

    return read


def test_verls_console_is_read_with_numpys_numbers_and_without_steps_that_only_validate(log):
    read = log(VERL)
    assert (read.framework, list(read.steps)) == ("verl", [12])
    assert read.steps[12]["timing_s/gen"] == 83.12345678
    assert read.steps[12]["timing_s/update_actor"] == 41.0
    assert read.steps[12]["perf/total_num_tokens"] == 1234567


def test_prefixes_of_ray_and_colours_do_not_matter(log):
    prefixed = "".join(f"\x1b[36m(TaskRunner pid=7)\x1b[0m {line}\n" for line in VERL.splitlines())
    assert log(prefixed).steps[12] == pytest.approx(log(VERL).steps[12], nan_ok=True)


def test_areals_tables_belong_to_the_step_named_before_them(log):
    read = log(AREAL + AREAL.replace("step 8/10", "step 9/10"))
    assert (read.framework, list(read.steps)) == ("AReaL", [8, 9])
    assert read.steps[9] == {
        "ppo_actor/update/version_stats/sample_staleness_theta_max": 0.0,
        "timeperf/train_step": 41.0,
        "timeperf/rollout": 83.123,
        "timeperf/update_weights": 4.25,
    }


def test_skyrls_mapping_is_read_entry_by_entry(log):
    read = log(SKYRL)
    assert (read.framework, list(read.steps)) == ("SkyRL", [3])
    assert read.steps[3]["timing/generate"] == 83.1235
    assert read.steps[3]["timing/train_critic_and_policy"] == 41.0


@pytest.mark.parametrize("text", [FILE_LOGGER, WANDB_CSV, WANDB_JSON], ids=["file-logger", "csv", "json"])
def test_other_formats_have_the_same_keys(log, text):
    read = log(text)
    assert read.framework == "verl"
    assert {key: read.steps[12][key] for key in ("timing_s/gen", "timing_s/update_actor")} == {
        "timing_s/gen": 83.1,
        "timing_s/update_actor": 41.0,
    }


def test_a_step_that_a_resumed_run_repeats_counts_as_logged_last(log):
    assert log(VERL + VERL.replace("83.12345678", "70.5")).steps[12]["timing_s/gen"] == 70.5


def test_the_unfinished_last_line_of_a_run_in_progress_is_left_out(log):
    assert list(log(FILE_LOGGER + '{"step":13,"da').steps) == [12]


def test_verls_trainer_mode_is_read_from_the_settings_that_it_prints(log):
    assert log("{'v1': {'trainer_mode': 'separate_async'}}\n" + VERL).trainer_mode == "separate_async"
    assert log(VERL).trainer_mode == ""


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "has no timings of steps; accepted: the console output of verl, AReaL or SkyRL"),
        ("step:1 - actor/loss:0.5\n", "has no timings of steps"),
        (VERL + SKYRL, "has timings of verl (line 2) and SkyRL (line 5); accepted: one framework a file"),
        (VERL.replace("83.12345678", "-1.5"), "line 2: timing_s/gen is -1.5; accepted: seconds, 0 or more"),
        (VERL.replace("83.12345678", "inf"), "line 2: timing_s/gen is inf; accepted: seconds, 0 or more"),
        (VERL.replace("83.12345678", "nan"), "line 2: timing_s/gen is nan"),
        (VERL.replace("83.12345678", "fast"), "line 2: timing_s/gen is fast"),
        (FILE_LOGGER + "oh\n" + FILE_LOGGER, "line 2: no JSON mapping"),
        ("Step,a - timing_s/gen,b - timing_s/gen\n1,2,3\n", "has 2 columns timing_s/gen; accepted: one run a file"),
    ],
)
def test_what_is_no_log_of_one_run_is_refused_with_the_place(log, text, complaint):
    with pytest.raises(UserError, match=re.escape(complaint)):
        log(text)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    for path in (tmp_path, tmp_path / "absent.log"):
        with pytest.raises(UserError, match=re.escape(f"{path}: ")):
            read_log(path)
