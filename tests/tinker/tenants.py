"""Two clients that train adapters of one base sample one after the other, then at the same time; prints what each got
and the seconds of both.

Run by the real SDK, in its own environment: `python tenants.py BASE_MODEL TIMES`, which prints so many lines.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Sequence

import numpy as np

import tinker
from tinker import types

NUM_REQUESTS, NUM_SAMPLES, MAX_TOKENS, RANKS = 3, 24, 60, (4, 8)


def main(base_model: str, times: int) -> None:
    samplers = [trained(base_model, rank) for rank in RANKS]
    prompts = [samplers[0].get_tokenizer().encode(f"Say {number}.") for number in range(NUM_REQUESTS)]
    for _ in range(times):
        begin_s = time.perf_counter()
        alone = [collected([one])[0] for one in (asked(each, prompts) for each in samplers)]
        middle_s = time.perf_counter()
        together = collected([asked(each, prompts) for each in samplers])
        seconds = {"alone_s": middle_s - begin_s, "together_s": time.perf_counter() - middle_s}
        print(json.dumps({"alone": alone, "together": together, **seconds}), flush=True)


def trained(base_model: str, rank: int) -> tinker.SamplingClient:
    """A sampler of an adapter that two updates have moved off the base."""
    training = tinker.ServiceClient().create_lora_training_client(base_model=base_model, rank=rank, seed=rank)
    tokens = training.get_tokenizer().encode("to be or not to be")
    inputs = {"target_tokens": np.array(tokens[1:], np.int64), "weights": np.ones(len(tokens) - 1, np.float32)}
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={name: types.TensorData.from_numpy(each) for name, each in inputs.items()},
    )
    for _ in range(2):
        training.forward_backward([datum], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=5e-2)).result()
    return training.save_weights_and_get_sampling_client()


def asked(sampler: tinker.SamplingClient, prompts: Sequence[list[int]]) -> list:
    """Requests under way; nothing but the length ends a sequence."""
    params = [types.SamplingParams(max_tokens=MAX_TOKENS, seed=seed, stop=[]) for seed in range(len(prompts))]
    return [
        sampler.sample(prompt=types.ModelInput.from_ints(each), num_samples=NUM_SAMPLES, sampling_params=one)
        for each, one in zip(prompts, params, strict=True)
    ]


def collected(clients: Sequence[list]) -> list[str]:
    """A hash of each client's tokens and log-probs, to the last bit."""
    results = [[future.result() for future in futures] for futures in clients]
    texts = [repr([(one.tokens, one.logprobs) for each in found for one in each.sequences]) for found in results]
    return [hashlib.sha256(text.encode()).hexdigest() for text in texts]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
