"""A device of several GPUs is placed, moved and billed as one device, and counted as its GPUs."""

from __future__ import annotations

import pytest

from rlmux.config import Purpose, load_spec
from rlmux.sim import api
from rlmux.sim.workloads.spec_file import workload_of

FILE = """\
cluster:
  pools:
    rollout: {{devices: 2{gpus}, usd_per_gpu_hour: 2}}
    train: {{devices: 2, usd_per_gpu_hour: 3}}
defaults:
  steps: 5
  slo_slowdown: 2.5
  task: sort
  model: {{heads: 4, kv_heads: 2}}
  estimate: {{rollout_s: 60, train_s: 40, rollout_switch_s: 1, train_switch_s: 1}}
  rollout: {{engine: {{name: vllm, python: python}}, tensor_parallel: {tensor_parallel}}}
pipelines: [{{name: a}}, {{name: b, seed: 1}}]
"""


def workload(tmp_path, num_gpus: int):
    gpus = f", gpus_per_device: {num_gpus}" if num_gpus > 1 else ""
    (tmp_path / "file.yaml").write_text(FILE.format(gpus=gpus, tensor_parallel=min(2, num_gpus)))
    return workload_of(load_spec(tmp_path / "file.yaml", purpose=Purpose.PLAN))


@pytest.mark.parametrize("policy", ["solo", "rollmux", "rlmux"])
def test_decisions_are_those_of_single_gpus_where_a_rollout_device_costs_as_much(tmp_path, policy):
    planned = [api.plan(workload(tmp_path, num_gpus), policy=policy) for num_gpus in (1, 4)]
    for one, four in zip(*(plan["pipelines"] for plan in planned), strict=True):
        assert [one[key] for key in ("status", "step_s")] == [four[key] for key in ("status", "step_s")]
        assert len(four["rollout_nodes"]) == 1


@pytest.mark.parametrize(("num_gpus", "usd"), [(1, 2 * 2 + 2 * 3), (4, 2 * 8 + 2 * 3)])
def test_a_plan_counts_and_bills_all_gpus(tmp_path, num_gpus, usd):
    plan = api.plan(workload(tmp_path, num_gpus), policy="solo")
    assert plan["gpus"] == {"rollout": 2 * num_gpus, "train": 2}
    assert plan["usd_per_hour"] == pytest.approx(usd)


def test_gpu_hours_and_costs_of_a_simulation_are_of_all_gpus(tmp_path):
    results = [api.simulate(workload(tmp_path, num_gpus), policies=["solo"]) for num_gpus in (1, 4)]
    one, four = (result["policies"]["solo"] for result in results)
    assert one["makespan_s"] == four["makespan_s"]
    hours = one["makespan_s"] / 3600
    assert four["cost_usd"] - one["cost_usd"] == pytest.approx(2 * (8 - 2) * hours)
    assert (one["peak_gpus"]["rollout"], four["peak_gpus"]["rollout"]) == (2, 8)
