"""What the SDK says of LoRA adapters, and what it does with them; prints what came of it.

Run by the real SDK, in its own environment: `python adapters.py BASE_MODEL`.
"""

from __future__ import annotations

import json
import sys

import numpy as np

import tinker
from tinker import types


def main(base_model: str) -> None:
    found: dict[str, object] = {}
    service = tinker.ServiceClient()
    choice = {"rank": 4, "seed": 5, "train_mlp": False, "train_unembed": False}
    training = service.create_lora_training_client(base_model=base_model, **choice)
    info = training.get_info()
    found["info"] = {"is_lora": info.is_lora, "lora_rank": info.lora_rank}
    tokens = training.get_tokenizer().encode("to be or not to be")
    inputs = {"target_tokens": np.array(tokens[1:], np.int64), "weights": np.ones(len(tokens) - 1, np.float32)}
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={name: types.TensorData.from_numpy(each) for name, each in inputs.items()},
    )
    losses = []
    for _ in range(3):
        step = training.forward_backward([datum], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=2e-2)).result()
        losses.append(step.result().metrics["loss:sum"])
    found["losses"] = losses

    prompt = types.ModelInput.from_ints(tokens)
    sampler = training.save_weights_and_get_sampling_client(name="live")
    trained = training.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    base = service.create_sampling_client(base_model=base_model)
    for name, client in (("score_gap", sampler), ("base_gap", base)):
        scored = client.compute_logprobs(prompt).result()
        found[name] = max(abs(a - b) for a, b in zip(scored[1:], trained, strict=True))

    saved = training.save_state("half").result().path
    resumed = service.create_training_client_from_state_with_optimizer(saved)
    after = [client.forward([datum], "cross_entropy").result().metrics["loss:sum"] for client in (training, resumed)]
    found["resumed_equal"] = after[0] == after[1]
    path = training.save_weights_for_sampler("kept").result().path
    params = types.SamplingParams(max_tokens=12, seed=7)
    asked = [
        client.sample(prompt=prompt, num_samples=3, sampling_params=params).result()
        for client in (sampler, tinker.ServiceClient().create_sampling_client(model_path=path))
    ]
    found["from_path"] = [one.tokens for one in asked[0].sequences] == [one.tokens for one in asked[1].sequences]
    rest = service.create_rest_client()
    run = rest.get_training_run(training.model_id).result()
    found["run"] = {"is_lora": run.is_lora, "lora_rank": run.lora_rank}
    weights = rest.get_weights_info_by_tinker_path(saved).result()
    found["weights"] = {
        name: getattr(weights, name) for name in ("is_lora", "lora_rank", "train_attn", "train_unembed")
    }

    refusals = {}
    other = service.create_lora_training_client(base_model=base_model, rank=8)
    for name, call in {
        "none": lambda: service.create_lora_training_client(base_model=base_model, rank=0),
        "large": lambda: service.create_lora_training_client(base_model=base_model, rank=17),
        "other": lambda: other.load_state(saved).result(),
    }.items():
        try:
            made = call()
            getattr(made, "result", lambda: None)()
            refusals[name] = "not refused"
        except Exception as error:  # the kinds are the SDK's own
            refusals[name] = f"{type(error).__name__}: {error}"
    found["refusals"] = refusals
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
