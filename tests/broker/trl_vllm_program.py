"""A real GRPOTrainer that generates with vLLM: trl_vllm_program.py NAME RECORD MODE STALL. MODE: colocate, one or two.

Real: GRPOTrainer, VLLMGeneration and its client, Adam. Not: vLLM, which needs a GPU. In the process there is an `LLM`
with the methods that TRL calls; as a server there are the routes that TRL's client calls, in a thread of this process.
Both have hashes of the weights that they were sent, and answer with what those give; asleep they have nothing, and at
level 2 no weights afterwards. One method of the client is replaced: the one that opens NCCL.
It prints a hash of the model's weights at the end, and of what each step was trained on.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import io
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import share
import torch
from in_process_ray import SIZE, Device, chain, fake_packages, write_phases

STEPS, LENGTH = 4, 8
LOGPROB = -5.55
"""Of each token: about what a model that has learned nothing gives it."""


class Engine:
    """What vLLM has on its device, and what it answers."""

    def __init__(self, pool: str, device: Device, is_awake: bool) -> None:
        self.pool, self.device = pool, device
        self.weights: dict[str, str] = {}
        self._set("weights", "kv_cache", is_there=is_awake)

    def _set(self, *things: str, is_there: bool) -> None:
        for thing in things:
            self.device.put(self.pool, f"engine's {thing}", SIZE // 10 if is_there else 0)

    def is_sleeping(self) -> bool:
        return not self.device.lies(self.pool, "engine's weights")

    def sleep(self, level: int = 1) -> None:
        if not self.device.lies(self.pool, "engine's kv_cache"):
            return  # as vLLM's: half awake counts as asleep
        self._set("weights", "kv_cache", is_there=False)
        if level == 2:
            self.weights = {}

    def wake_up(self, tags=("weights", "kv_cache")) -> None:
        self._set(*tags, is_there=True)

    def load_weights(self, weights) -> None:
        self.device.compute(self.pool, "engine's weights", "receive")
        for name, tensor in weights:
            self.weights[name] = hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()

    def answer(self, prompts, times: int) -> list[list[int]]:
        self.device.compute(self.pool, "engine's kv_cache", "generate")
        assert self.weights, "an engine without weights"
        state = chain("", *sorted(self.weights.items()))
        return [
            list(bytes.fromhex(chain(state, row, ids, at)))[:LENGTH]
            for row, ids in enumerate(prompts)
            for at in range(times)
        ]


def in_process(pool: str, device: Device) -> type:
    """As `vllm.LLM`."""

    class LLM(Engine):
        def __init__(self, **options) -> None:
            assert options["enable_sleep_mode"]
            super().__init__(pool, device, is_awake=True)
            runner = SimpleNamespace(model=SimpleNamespace(load_weights=self.load_weights))
            worker = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
            self.llm_engine = SimpleNamespace(model_executor=worker)

        def reset_prefix_cache(self) -> None: ...

        def generate(self, prompts, sampling_params, **_):
            rows = [prompt["prompt_token_ids"] for prompt in prompts]
            return [
                SimpleNamespace(prompt_token_ids=row, outputs=[SimpleNamespace(token_ids=ids, logprobs=one(ids))])
                for row, ids in zip(rows, self.answer(rows, sampling_params.n), strict=True)
            ]

    def one(ids):
        return [{token: SimpleNamespace(rank=1, logprob=LOGPROB)} for token in ids]

    return LLM


class Routes(BaseHTTPRequestHandler):
    """As `vllm serve` in its development mode; /tensors stands for NCCL."""

    engine: Engine
    config: dict

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        answers = {
            "/health": {},
            "/v1/models": {"data": [{"id": "m"}]},
            "/get_world_size": {"world_size": 1},
            "/is_sleeping": {"is_sleeping": self.engine.is_sleeping()},
            "/server_info": {"vllm_config": self.config},
        }
        self._answer(answers[path])

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.partition("?")[0]
        if path == "/sleep":
            self.engine.sleep()
        elif path == "/wake_up":
            self.engine.wake_up()
        elif path == "/tensors":
            self.engine.load_weights(torch.load(io.BytesIO(body)))
        elif path == "/v1/completions":
            self._answer({"choices": self._choices(json.loads(body))})
            return
        self._answer({})

    def _choices(self, asked: dict) -> list[dict]:
        rows = [prompt for prompt in asked["prompt"] for _ in range(asked["n"])]
        answers = self.engine.answer(asked["prompt"], asked["n"])
        return [
            {"prompt_token_ids": row, "token_ids": ids, "logprobs": {
                "tokens": [f"token_id:{one}" for one in ids], "token_logprobs": [LOGPROB] * len(ids),
                "top_logprobs": [None] * len(ids)}}
            for row, ids in zip(rows, answers, strict=True)
        ]  # fmt: skip

    def _answer(self, value: dict) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_) -> None: ...


def serve(engine: Engine, can_sleep: bool) -> str:
    Routes.engine = engine
    Routes.config = {
        "weight_transfer_config": {},
        "model_config": {"logprobs_mode": "processed_logprobs", "enable_sleep_mode": can_sleep},
    }
    server = ThreadingHTTPServer(("127.0.0.1", 0), Routes)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def stand_in_for_vllm(pool: str, device: Device) -> None:
    fake_packages("vllm")
    importlib.import_module("vllm").LLM = in_process(pool, device)

    def packed_nccl_broadcast_producer(iterator, group, **_) -> None:
        sent = io.BytesIO()
        torch.save([(name, tensor.clone()) for name, tensor in iterator], sent)
        group.session.post(f"{group.base_url}/tensors", data=sent.getvalue()).raise_for_status()

    packed = importlib.import_module("vllm.distributed.weight_transfer.packed_tensor")
    packed.packed_nccl_broadcast_producer = packed_nccl_broadcast_producer
    from trl.generation.vllm_client import VLLMClient

    def init_communicator(client, **_) -> None:
        assert client.get_server_info()["weight_transfer_config"] is not None
        client.communicator = client

    VLLMClient.init_communicator = init_communicator


def told(function, before, after):
    def hook(*args, **kwargs):
        before()
        result = function(*args, **kwargs)
        after()
        return result

    return hook


def main(name: str, record: Path, mode: str, stall: str) -> None:
    device = Device(name, record, stall)
    write_phases(share, device)
    train, rollout = ("train", "rollout") if mode == "two" else ("gpu0", "gpu0")
    stand_in_for_vllm(rollout, device)
    sys.modules["rlmux"] = SimpleNamespace(share=share)  # the example takes it from there
    from recorded_trl import own_trl, resident_bytes

    options = {"vllm_mode": "colocate", "vllm_enable_sleep_mode": True}
    if mode != "colocate":
        is_alone = "RLMUX_BROKER" not in os.environ  # else it was put to sleep, as another may have the pool
        url = serve(Engine(rollout, device, is_awake=is_alone), can_sleep=stall != "cannot sleep")
        options = {"vllm_mode": "server", "vllm_server_base_url": url}
    own_trl.GRPOConfig = functools.partial(own_trl.GRPOConfig, use_vllm=True, **options)
    torch.set_num_threads(1)
    batches = []

    def on_train(*_) -> None:
        device.put(train, "model", resident_bytes())

    job = share.join("trl", pools={"rollout": rollout, "train": train})
    with job.phase("train", also=("rollout",)):
        trainer = own_trl.make_trainer(str(record.parent / name), STEPS, ord(name[0]))
        on_train()
        step, rewards = trainer.training_step, trainer._calculate_rewards

        def training_step(*args, **kwargs):
            result = step(*args, **kwargs)
            device.compute(train, "model", "step")
            return result

        def calculate_rewards(inputs, prompts, completions, ids):
            batches.append(chain("", ids))
            return rewards(inputs, prompts, completions, ids)

        trainer.training_step, trainer._calculate_rewards = training_step, calculate_rewards
        share.trl(trainer, job)
        hooks = job._hooks.get(train)
        job._hooks[train] = hooks._replace(
            offload=told(hooks.offload, on_train, on_train), onload=told(hooks.onload, on_train, on_train)
        )
        try:
            trainer.train()
        except KeyError:
            failed = True
        else:
            failed = False
            print("ENDS", own_trl.sha256_of(trainer.model), *batches, flush=True)
    if failed:
        device.write(train, "failed")
        threading.Event().wait()


if __name__ == "__main__":
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4])
