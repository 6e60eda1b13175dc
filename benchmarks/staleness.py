"""What stale tokens cost in learning, with and without the decoupled objective.

    python benchmarks/staleness.py [--pipeline sort] [--staleness 0,4,8] [--seeds N] [--steps N] [--updates N] [--json]

Reward over the last 20 steps, mean of the seeds and their range. Every token of a step is as stale as the bound allows,
which a real run reaches only where rollouts are the shorter phase. `--updates`: mini-batches of a step; the clip of
`ppo` binds from the first one on where tokens are stale.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from statistics import fmean

import torch
from learning import CONFIGS, learn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pipeline", default="sort", choices=sorted(CONFIGS))
    parser.add_argument("--staleness", default="0,4,8", help="bounds in versions, at most 8")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    base = CONFIGS[arguments.pipeline]
    for staleness in map(int, arguments.staleness.split(",")):
        for objective in ("ppo", "decoupled") if staleness else ("ppo",):
            algorithm = replace(
                base.algorithm, staleness=staleness, objective=objective, num_minibatches=arguments.updates
            )
            config = replace(base, algorithm=algorithm, num_steps=arguments.steps or base.num_steps)
            rewards = [learn(replace(config, seed=seed))["reward_last"] for seed in range(arguments.seeds)]
            row = {"pipeline": base.name, "staleness": staleness, "objective": objective, "rewards": rewards}
            if arguments.json:
                print(json.dumps(row), flush=True)
            else:
                spread = f"{min(rewards):.3f} to {max(rewards):.3f}"
                print(f"staleness {staleness}  {objective:10} reward {fmean(rewards):.3f}  ({spread})", flush=True)


if __name__ == "__main__":
    main()
