"""Files of pipelines that train in seconds, for tests of what happens around them."""

from __future__ import annotations

SORT = "{name: a, seed: 1, task: sort}"
REVERSE = "{name: b, seed: 2, task: reverse}"


def small_file(*pipelines: str, steps: int) -> str:
    """A cluster of one device for each phase and these pipelines, each a YAML mapping."""
    return f"""\
cluster: {{pools: {{rollout: {{devices: 1}}, train: {{devices: 1}}}}}}
defaults:
  steps: {steps}
  model: {{hidden_size: 16, layers: 1, heads: 2, kv_heads: 1, intermediate_size: 32}}
  sft_warmup: {{updates: 2, batch_size: 8}}
  algorithm: {{prompts_per_step: 2, group_size: 4}}
  rollout: {{max_new_tokens: 6, slots: 8}}
pipelines:
""" + "".join(f"  - {pipeline}\n" for pipeline in pipelines)


RAISING_POLICY = """\
from dataclasses import dataclass
from rlmux.policies.baselines import Fifo

@dataclass(frozen=True, kw_only=True)
class Raising(Fifo):
    name: str = "raising"

    def dispatch(self, plan):
        return plan.no_such_thing
"""
"""A module with a policy `Raising` of a user's own, of which no decision to start work succeeds."""
