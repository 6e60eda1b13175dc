"""Weights that the SDK and its command line download; prints what a trained model makes of a text.

Run by the real SDK, in its own environment: `python download.py BASE_MODEL FOLDER`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np

import tinker
from tinker import types


def main(base_model: str, folder: Path) -> None:
    service = tinker.ServiceClient()
    training = service.create_lora_training_client(base_model=base_model, rank=4)
    tokens = training.get_tokenizer().encode("to be or not to be")
    inputs = {"target_tokens": np.array(tokens[1:], np.int64), "weights": np.ones(len(tokens) - 1, np.float32)}
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={name: types.TensorData.from_numpy(each) for name, each in inputs.items()},
    )
    for _ in range(3):
        training.forward_backward([datum], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=2e-2)).result()
    logprobs = training.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data

    path = training.save_weights_external("mine").result().path
    rest = service.create_rest_client()
    found = rest.get_external_weights_urls(path).result()
    (folder / "sdk").mkdir(parents=True)
    for name, url in found.urls.items():
        urllib.request.urlretrieve(url, folder / "sdk" / name)

    saved = training.save_state("half").result().path
    command = [sys.executable, "-m", "tinker.cli", "checkpoint", "download", saved, "--output", str(folder / "cli")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    refusals = {}
    for name, call in {
        "age": lambda: training.save_weights_external("secret", age_encryption_recipients=["age1x"]).result(),
        "load": lambda: service.create_training_client_from_state(path).result(),
    }.items():
        try:
            call()
        except tinker.TinkerError as error:
            refusals[name] = str(error)
    listed = rest.list_checkpoints(training.model_id).result().checkpoints
    print(
        json.dumps(
            {
                "path": path,
                "tokens": tokens,
                "logprobs": list(logprobs),
                "types": {one.checkpoint_id: one.checkpoint_type for one in listed},
                "refusals": refusals,
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
