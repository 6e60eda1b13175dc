"""Tables are aligned and exact; comparisons are ratios to the first policy."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from rlmux.api.commands import with_worth
from rlmux.cli import tables
from rlmux.runtime.checks import run_comparison


def summary(makespan_s: float, *, sha: str = "x", status: str = "finished", tails: int = 0) -> dict:
    return {
        "policy": "rollmux",
        "makespan_s": makespan_s,
        "tokens_per_s": 1000 / makespan_s,
        "control_overhead": 0.01,
        "mechanisms": {
            "tails": dict.fromkeys(("migrations", "trajectories", "tokens", "kv_bytes", "seconds", "freed_s"), tails),
            "shards": {"migrations": 0, "trajectories": 0},
            "tool_waits": {"given_away": 0, "freed_s": 0.0},
            "fractions": {"orders": 0, "seconds": 0.0},
        },
        "pipelines": {
            name: {
                "steps": 2,
                "tokens": 500,
                "reward_first": 0.25,
                "reward_last": None,
                "step_s_mean": 1.5,
                "step_slowdown": slowdown,
                "slo_slowdown": None,
                "keeps_slo": None,
                "promise": "exact",
                "slo_reason": "",
                "moves": [{"time_s": 1.0}] if name == "a" else [],
                "slo_probability": None,
                "bound": None,
                "estimate": None,
                "status": status,
                "weights_sha256": sha + name,
            }
            for name, slowdown in (("a", 1.0), ("b", 1.5))
        },
        "devices": {
            "rollout-0.0": {
                "pool": "rollout",
                "busy_s": 3.0,
                "switch_s": 0.5,
                "bubble_s": 0.25,
                "idle_s": 0.25,
                "utilization": 0.75,
            }
        },
    }


def test_columns_are_aligned_with_numbers_to_the_right(capsys):
    tables.print_rows([{"name": "a", "n": 5, "share": 0.123456}, {"name": "long", "n": 12345, "share": None}])
    assert capsys.readouterr().out.splitlines() == [
        "name       n   share",
        "a          5  0.1235",
        "long  12,345       -",
    ]


def test_cells_are_neither_wrapped_nor_read_as_markup_and_wide_characters_count_as_two(capsys):
    tables.print_rows([{"said": "[b]" * 100, "n": 1}, {"said": "日本", "n": 2}])
    assert capsys.readouterr().out.splitlines()[1:] == ["[b]" * 100 + "  1", "日本" + " " * 296 + "  2"]


def test_json_has_null_for_what_is_not_finite(capsys):
    tables.print_json({"a": math.inf, "b": [math.nan, 1.5], "c": {"d": -math.inf}})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [None, 1.5], "c": {"d": None}}


def test_a_run_is_shown_with_its_timeline(tmp_path: Path, capsys):
    (tmp_path / "timeline.html").write_text("")
    tables.show_run(summary(4.0), tmp_path, as_json=False)
    out = capsys.readouterr().out
    assert "policy rollmux: 4 s, 250 tokens/s" in out
    assert "0.25 → -" in out
    assert "a: moves: 1\n" in out
    assert "mechanisms:" not in out
    assert "b: moves" not in out
    assert f"timeline: {tmp_path / 'timeline.html'}" in out


def test_a_run_says_in_one_line_what_the_mechanisms_did(tmp_path: Path, capsys):
    tables.show_run(summary(4.0, tails=3), tmp_path, as_json=False)
    said = "mechanisms: 3 begun tails moved (3 trajectories, 3 tokens), 3 device-seconds freed\n"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(("status", "code"), [("finished", 0), ("cancelled", 0), ("failed", 1), ("refused", 1)])
def test_a_pipeline_that_failed_makes_the_exit_code_1(status, code):
    assert tables.exit_code(summary(1.0, status=status)) == code


def test_a_comparison_gives_ratios_to_the_first_policy():
    table = run_comparison.compare([{"solo": summary(10.0), "rollmux": summary(6.25), "other": summary(10.0, sha="y")}])
    assert [row["speedup"] for row in table.values()] == [1.0, 1.6, 1.0]
    assert table["rollmux"]["tokens_ratio"] == pytest.approx(1.6)
    assert table["rollmux"]["mean_step_slowdown"] == 1.25
    assert table["rollmux"]["max_step_slowdown"] == 1.5
    assert table["rollmux"]["utilization"] == {"rollout": 0.75}
    assert [row["same_weights"] for row in table.values()] == [True, True, False]


def test_a_comparison_with_ablations_says_what_mechanisms_are_worth(capsys):
    rows = run_comparison.compare([{"rlmux": summary(8.0), "rlmux-no-tails": summary(10.0)}])
    table = with_worth({"folder": "runs/x", "policies": rows})
    tables.show_comparison(table, as_json=False)
    assert "rlmux   tails       makespan s     8       10  125.0%" in capsys.readouterr().out.splitlines()
    tables.show_comparison(table, as_json=True)
    worth = {"policy": "rlmux-no-tails", "figure": "makespan_s", "with": 8.0, "without": 10.0, "ratio": 1.25}
    assert json.loads(capsys.readouterr().out)["ablations"] == {"rlmux": {"tails": worth}}


def test_a_comparison_of_several_rounds_has_medians_and_the_ratio_of_each_round(capsys):
    seconds = [(8.0, 10.0), (10.0, 10.0), (9.0, 18.0)]
    rounds = [{"rlmux": summary(kept), "rlmux-no-tails": summary(without)} for kept, without in seconds]
    table = with_worth({"folder": "runs/x", "policies": run_comparison.compare(rounds)})
    assert table["policies"]["rlmux"]["makespan_s"] == 9.0
    assert table["policies"]["rlmux"]["makespans_s"] == [8.0, 10.0, 9.0]
    assert table["ablations"]["rlmux"]["tails"]["ratios"] == [1.0, 1.25, 2.0]
    tables.show_comparison(table, as_json=False)
    out = capsys.readouterr().out
    assert "rlmux   tails       makespan s     9       10  125.0%        100.0% to 200.0%" in out.splitlines()
    assert "medians of 3 rounds" in out


def test_a_comparison_shows_what_moved_under_each_policy_if_anything_did(capsys):
    quiet = {"folder": "runs/x", "policies": run_comparison.compare([{"rollmux": summary(8.0)}])}
    tables.show_comparison(quiet, as_json=False)
    assert "what the mechanisms did" not in capsys.readouterr().out
    moved = {"folder": "runs/x", "policies": run_comparison.compare([{"rlmux": summary(8.0, tails=3)}])}
    tables.show_comparison(moved, as_json=False)
    assert "what the mechanisms did:" in capsys.readouterr().out


def test_weights_that_are_not_known_are_not_the_same():
    unknown = summary(1.0)
    for pipeline in unknown["pipelines"].values():
        pipeline["weights_sha256"] = None
    assert run_comparison.compare([{"solo": unknown}])["solo"]["same_weights"] is None
