"""The SDK's own calls, one after another, against the server that TINKER_BASE_URL names; prints what came of them.

Run by the real SDK, in its own environment: `python surface.py BASE_MODEL`.
"""

from __future__ import annotations

import json
import sys

import numpy as np

import tinker
from tinker import types


def datum(tokens: list[int], **arrays: list[float]) -> types.Datum:
    inputs = {name: types.TensorData.from_numpy(np.array(values, np.float32)) for name, values in arrays.items()}
    targets = types.TensorData.from_numpy(np.array(tokens[1:], np.int64))
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": targets, **inputs}
    )


def main(base_model: str) -> None:
    found: dict[str, object] = {}
    service = tinker.ServiceClient()
    found["models"] = [model.model_name for model in service.get_server_capabilities().supported_models]
    training = service.create_lora_training_client(base_model=base_model, rank=8)
    tokenizer = training.get_tokenizer()
    texts = ["to be or not to be", "that is the question"]
    encoded = [tokenizer.encode(text) for text in texts]
    data = [datum(tokens, weights=[1.0] * (len(tokens) - 1)) for tokens in encoded]

    losses = []
    for _ in range(3):
        step = training.forward_backward(data, "cross_entropy")
        update = training.optim_step(types.AdamParams(learning_rate=3e-3))
        losses.append(step.result().metrics["loss:sum"])
        found["optim_metrics"] = update.result().metrics
    found["losses"] = losses
    forward = training.forward(data, "cross_entropy").result()
    found["forward_lengths"] = [len(one["logprobs"].data) for one in forward.loss_fn_outputs]
    found["lengths"] = [len(tokens) - 1 for tokens in encoded]

    def custom(data, logprobs):  # the client computes it, from log-probs as torch tensors
        loss = -sum(one.sum() for one in logprobs)
        return loss, {"mine": float(loss)}

    try:
        import torch  # noqa: F401

        found["custom"] = training.forward_backward_custom(data, custom).result().metrics["mine"]
        training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    except ImportError:
        found["custom"] = None

    sampler = training.save_weights_and_get_sampling_client(name="live")
    prompt = types.ModelInput.from_ints(encoded[0])

    def sampled(client: tinker.SamplingClient, **params: object) -> list[list[int]]:
        chosen = types.SamplingParams(**{"max_tokens": 12, "seed": 7, **params})
        answer = client.sample(prompt=prompt, num_samples=3, sampling_params=chosen).result()
        assert all(len(one.tokens) == len(one.logprobs) for one in answer.sequences)
        return [one.tokens for one in answer.sequences]

    found["sampled"] = sampled(sampler)
    found["hot"] = sampled(sampler, temperature=2.0)
    found["greedy"] = sampled(sampler, temperature=0.0)
    found["stopped"] = sampled(sampler, stop=["e"], max_tokens=60)
    found["stop_text"] = [tokenizer.decode(tokens) for tokens in found["stopped"]]
    scored = sampler.compute_logprobs(prompt).result()
    forwarded = training.forward([data[0]], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    found["score_gap"] = max(abs(a - b) for a, b in zip(scored[1:], forwarded, strict=True))

    saved = training.save_state("half").result().path
    resumed = service.create_training_client_from_state_with_optimizer(saved)
    after = [client.forward(data, "cross_entropy").result().metrics["loss:sum"] for client in (training, resumed)]
    found["resumed_equal"] = after[0] == after[1]
    path = training.save_weights_for_sampler("kept").result().path
    found["from_path"] = sampled(service.create_sampling_client(model_path=path)) == sampled(sampler)
    rest = service.create_rest_client()
    run = rest.get_training_run(training.model_id).result()
    listed = rest.list_checkpoints(training.model_id).result().checkpoints
    found["listed"] = sorted(one.checkpoint_id for one in listed)
    found["last_checkpoint"] = run.last_checkpoint.tinker_path == saved
    rest.delete_checkpoint(training.model_id, "weights/half").result()
    found["left"] = sorted(one.checkpoint_id for one in rest.list_checkpoints(training.model_id).result().checkpoints)

    refusals = {}
    for name, call in {
        "loss": lambda: training.forward_backward(data, "dro").result(),
        "after": lambda: training.optim_step(types.AdamParams(learning_rate=1e-3)).result(),
        "top_p": lambda: sampled(sampler, top_p=0.5),
        "model": lambda: service.create_lora_training_client(base_model="org/other", rank=8).result(),
        "path": lambda: service.create_sampling_client(model_path="tinker://nobody/weights/x").result(),
    }.items():
        try:
            call()
            refusals[name] = "not refused"
        except Exception as error:  # the kinds are the SDK's own
            refusals[name] = f"{type(error).__name__}: {error}"
    found["refusals"] = refusals
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
