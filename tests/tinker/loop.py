"""A short training loop over the SDK alone, whose rewards differ within a group; prints a line after each step.

Run by the real SDK: `python loop.py BASE_MODEL SEED STEPS`. The last line has the path of the weights it ended with.
"""

from __future__ import annotations

import hashlib
import json
import sys

import numpy as np

import tinker
from tinker import types

GROUPS, GROUP_SIZE, MAX_TOKENS = 3, 4, 8


def main(base_model: str, seed: int, steps: int) -> None:
    training = tinker.ServiceClient().create_lora_training_client(base_model=base_model, rank=8, seed=seed)
    tokenizer = training.get_tokenizer()
    for step in range(steps):
        sampler = training.save_weights_and_get_sampling_client()
        prompts = [tokenizer.encode(f"Say {1000 * seed + GROUPS * step + group}.") for group in range(GROUPS)]
        params = types.SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0)
        asked = [
            sampler.sample(prompt=types.ModelInput.from_ints(each), num_samples=GROUP_SIZE, sampling_params=params)
            for each in prompts
        ]
        groups = [(prompt, answer.result().sequences) for prompt, answer in zip(prompts, asked, strict=True)]
        rewards = [[sum(map(ord, tokenizer.decode(one.tokens))) % 7 for one in group] for _, group in groups]
        data = [
            datum(prompt, one.tokens, one.logprobs, reward - sum(of_group) / GROUP_SIZE)
            for (prompt, group), of_group in zip(groups, rewards, strict=True)
            for one, reward in zip(group, of_group, strict=True)
        ]
        loss = training.forward_backward(data, "importance_sampling")
        update = training.optim_step(types.AdamParams(learning_rate=1e-2))
        trained = [one["logprobs"].data for one in loss.result().loss_fn_outputs]
        update.result()
        gap = max(
            abs(ours - theirs)
            for one, logprobs in zip(data, trained, strict=True)
            for ours, theirs, target in zip(
                one.loss_fn_inputs["logprobs"].data, logprobs, one.loss_fn_inputs["advantages"].data, strict=True
            )
            if target
        )
        sampled = repr([(one.tokens, one.logprobs) for _, group in groups for one in group])
        sha256 = hashlib.sha256(sampled.encode()).hexdigest()
        print(json.dumps({"step": step, "rewards": rewards, "sampled": sha256, "gap": gap}), flush=True)
    print(json.dumps({"path": training.save_state("end").result().path}), flush=True)


def datum(prompt: list[int], tokens: list[int], logprobs: list[float], advantage: float) -> types.Datum:
    """A sample as the loss takes it: nothing is asked of the prompt's tokens."""
    words, num_before = [*prompt, *tokens], len(prompt) - 1
    inputs = {
        "target_tokens": np.array(words[1:], np.int64),
        "logprobs": np.array([0.0] * num_before + list(logprobs), np.float32),
        "advantages": np.array([0.0] * num_before + [advantage] * len(tokens), np.float32),
    }
    return types.Datum(
        model_input=types.ModelInput.from_ints(words[:-1]),
        loss_fn_inputs={name: types.TensorData.from_numpy(array) for name, array in inputs.items()},
    )


if __name__ == "__main__":
    name, *numbers = sys.argv[1:]
    main(name, *map(int, numbers))
