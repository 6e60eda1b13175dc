"""OpenRLHF's own command line in phases of a job: openrlhf_program.py NAME RECORD STALL [its options].

Real: its script with its parser, PPOTrainer.fit, RemoteExperienceMaker, SamplesGenerator, RayActorGroup. Not: Ray (its
calls happen in this process), the workers and the engines, which need GPUs, datasets and the tokenizer. vllm, deepspeed
and flash_attn are empty packages. In place of weights the workers have a chain of hashes, and a tensor that has to
leave with it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import share
import share_openrlhf
from in_process_ray import SIZE, Device, Handle, chain, fake_packages, use_ray_in_process, write_phases

STEPS, BATCH, LENGTH = 4, 2, 8
POOL = "gpu0"
OPTIONS = (
    "--actor.model_name_or_path none --data.prompt_dataset none --reward.remote_url none --train.colocate_all "
    "--vllm.num_engines 1 --vllm.enable_sleep --ds.enable_sleep --actor.num_gpus_per_node 1 --ref.num_gpus_per_node 1 "
    f"--rollout.batch_size {BATCH} --rollout.n_samples_per_prompt 2 --train.batch_size {2 * BATCH} "
    "--rollout.micro_batch_size 2 --eval.steps 2 --eval.n_samples_per_prompt 2 --ckpt.save_steps 3 "
    "--algo.advantage.estimator reinforce --algo.kl.init_coef 0.01 --train.num_episodes 1"
).split()


def numbers(state: str, *things: object) -> list[int]:
    return [int(digit, 16) for digit in chain(state, *things)[:LENGTH]]


class Worker:
    """A policy or a reference; what its tensor has on the host is not on the device."""

    def __init__(self, role: str, device: Device) -> None:
        import torch

        self.role, self.device = role, device
        self.state, self.grads = chain(device.name), ""
        self.model = torch.nn.Linear(4, 4)
        self.batches: list[str] = []
        self.engines: list[Engine] = []

    def init_model_from_pretrained(self, *given):
        self.engines = given[-1] if self.role == "PolicyModelActor" else []
        self.write()

    def write(self):
        is_here = all(parameter.untyped_storage().nbytes() for parameter in self.model.parameters())
        self.device.put(POOL, f"{self.role}'s model", SIZE // 10 if is_here else 0)

    def execute_batch(self, name, chunk, start, end):
        rows = [{key: value[at] for key, value in chunk.items()} for at in range(start, end)]
        return [getattr(self, name)(**row) for row in rows]

    def forward(self, sequences, action_mask, **_):
        import torch

        self.device.compute(POOL, f"{self.role}'s model", "forward")
        width = action_mask.shape[1]
        rows = [(numbers(self.state, row.tolist()) * width)[:width] for row in sequences]
        return -torch.tensor(rows) / 16.0

    def append(self, experience):
        self.batches.append(chain("", experience.sequences.tolist(), experience.advantages.tolist()))

    def reload_states(self):
        self.device.put(POOL, f"{self.role}'s optimizer", SIZE // 10)

    def offload_states(self):
        self.device.put(POOL, f"{self.role}'s optimizer", 0)

    def fit(self, **_):
        self.device.compute(POOL, f"{self.role}'s optimizer", "fit")
        self.state = chain(self.state, self.batches)
        return {"loss": 0.0}

    def broadcast_to_vllm(self):
        self.device.compute(POOL, f"{self.role}'s model", "broadcast")
        for engine in self.engines:
            engine._worker.load(self.state)

    def save_checkpoint(self, **_):
        self.device.compute(POOL, f"{self.role}'s model", "save_checkpoint")

    def save_model(self):
        self.device.compute(POOL, f"{self.role}'s model", "save_model")

    def empty_cache(self): ...


class Engine:
    """As vLLM's: one that has its weights only counts as asleep, and `sleep` does nothing to it."""

    def __init__(self, device: Device) -> None:
        self.device, self.state = device, chain(device.name)
        self._things: set[str] = set()
        self.wake_up()
        self.sleep()

    def _set(self, things: set[str]) -> None:
        self._things = things
        for thing in ("weights", "kv_cache"):
            self.device.put(POOL, f"engine's {thing}", SIZE // 10 if thing in things else 0)

    def wake_up(self, tags=("weights", "kv_cache")):
        self._set(self._things | set(tags))

    def sleep(self, level=1):
        if len(self._things) == 2:
            self._set(set())

    def load(self, state):
        self.device.compute(POOL, "engine's weights", "receive")
        self.state = state

    def get_num_unfinished_requests(self):
        return 0

    def generate_responses(self, prompt, label, num_samples, sampling_params, **_):
        what = "evaluate" if prompt.startswith("eval") else "generate"
        self.device.compute(POOL, "engine's kv_cache", what)
        return [self._response(prompt, label, numbers(self.state, prompt, at)) for at in range(num_samples)]

    @staticmethod
    def _response(prompt, label, answer):
        reward = float(sum(answer))
        return {
            "prompt": prompt, "label": label, "observation_tokens": [1, 2, *answer], "reward": reward, "scores": reward,
            "action_ranges": [(2, 2 + len(answer))], "rollout_log_probs": None, "truncated": False, "extra_logs": {},
        }  # fmt: skip


class Prompts(list):
    def state_dict(self):
        return {}


def prompts(kind: str, count: int) -> Prompts:
    return Prompts(("none", [f"{kind} {at}"], ["label"], [None]) for at in range(count))


def main(name: str, record: Path, stall: str) -> None:
    fake_packages("vllm", "flash_attn", "deepspeed")
    use_ray_in_process()
    import openrlhf.trainer.ray as engines
    import openrlhf.utils as utils
    from openrlhf.trainer import ppo_trainer
    from openrlhf.trainer.ray import launcher

    device = Device(name, record, stall)
    write_phases(share, device)
    made = {}

    def initiate(group, *_):
        role = group.ray_actor_type.__ray_metadata__.class_name
        made[role] = Worker(role, device)
        group._actor_handlers = [Handle(made[role])]

    def writing(function):
        def hook(worker):
            result = function(worker)
            worker.write()
            return result

        return hook

    share_openrlhf._leave, share_openrlhf._come_back = map(writing, (share_openrlhf._leave, share_openrlhf._come_back))
    launcher.RayActorGroup._initiate_actors = initiate
    sys.modules["ray.util.placement_group"].placement_group = lambda *_, **__: SimpleNamespace(ready=lambda: None)
    sys.modules["ray"].is_initialized = lambda: True
    engines.create_vllm_engines = lambda *_, **__: [Handle(Engine(device))]
    utils.get_strategy = lambda args: SimpleNamespace(args=args, print=lambda *_: None)
    tokenizer = SimpleNamespace(pad_token_id=0, decode=lambda tokens, **_: [str(tokens)])
    ppo_trainer.get_tokenizer = lambda *_, **__: tokenizer
    ppo_trainer.prepare_datasets = lambda *_: (prompts("train", STEPS * BATCH), prompts("eval", BATCH), STEPS)
    if "RLMUX_BROKER" not in os.environ:  # the trainer stays a Ray actor then, and Ray is in this process
        trainer = ppo_trainer.PPOTrainer.__ray_metadata__.modified_class
        ppo_trainer.PPOTrainer = SimpleNamespace(remote=lambda *given, **more: Handle(trainer(*given, **more)))
    share_openrlhf.main()
    policy = made["PolicyModelActor"]
    print("ENDS", policy.state, *policy.batches, flush=True)


if __name__ == "__main__":
    words = sys.argv[1:]
    sys.argv[1:] = [option for option in OPTIONS if f"-{option}" not in words]
    main(words[0], Path(words[1]), words[2])
