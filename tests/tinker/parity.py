"""A run of the cookbook's own RL loop whose rewards differ within a group, so that weights move.

Run by the real cookbook, in its own environment: `python parity.py NAME MODEL LOG_PATH STEPS SAVE_EVERY SEED`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from functools import partial

import chz
from tinker_cookbook import renderers
from tinker_cookbook.rl import train
from tinker_cookbook.rl.problem_env import ProblemEnv, ProblemGroupBuilder
from tinker_cookbook.rl.types import RLDataset, RLDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer

GROUP_SIZE, GROUPS = 4, 4
THINKING_S = 0.1


class ParityEnv(ProblemEnv):
    """Right is an answer whose characters sum to an even number."""

    def __init__(self, number: int, renderer: renderers.Renderer) -> None:
        super().__init__(renderer, format_coef=0.0)
        self.number = number

    def get_question(self) -> str:
        return f"Say {self.number}."

    def check_answer(self, sample_str: str) -> bool:
        time.sleep(THINKING_S / (GROUP_SIZE * GROUPS))
        return sum(map(ord, sample_str)) % 2 == 0

    def check_format(self, sample_str: str) -> bool:
        return True

    def get_reference_answer(self) -> str:
        return ""


class ParityDataset(RLDataset):
    def __init__(self, renderer: renderers.Renderer, seed: int, num_batches: int) -> None:
        self.renderer, self.seed, self.num_batches = renderer, seed, num_batches

    def get_batch(self, index: int) -> list[ProblemGroupBuilder]:
        numbers = [1000 * self.seed + GROUPS * index + group for group in range(GROUPS)]
        return [ProblemGroupBuilder(partial(ParityEnv, each, self.renderer), GROUP_SIZE) for each in numbers]

    def __len__(self) -> int:
        return self.num_batches


@chz.chz
class ParityDatasetBuilder(RLDatasetBuilder):
    model_name: str
    seed: int
    num_batches: int

    async def __call__(self) -> tuple[ParityDataset, None]:
        renderer = renderers.get_renderer("role_colon", tokenizer=get_tokenizer(self.model_name))
        return ParityDataset(renderer, self.seed, self.num_batches), None


def main(name: str, model: str, log_path: str, steps: int, save_every: int, seed: int) -> None:
    config = train.Config(
        learning_rate=1e-2,
        dataset_builder=ParityDatasetBuilder(model_name=model, seed=seed, num_batches=steps),
        model_name=model,
        renderer_name="role_colon",
        recipe_name=name,
        max_tokens=8,
        lora_rank=8,
        loss_fn="importance_sampling",
        log_path=log_path,
        eval_every=0,
        save_every=save_every,
    )
    asyncio.run(train.main(config))


if __name__ == "__main__":
    name, model, log_path, *numbers = sys.argv[1:]
    main(name, model, log_path, *map(int, numbers))
