"""SkyRL's own experiment, trainer and dispatch in phases of a job: skyrl_program.py NAME RECORD COLOCATED STALL.

Real: BasePPOExp.run, RayPPOTrainer.build_models and .train, WorkerDispatch, PPORayActorGroup. Not: Ray (its calls
happen in this process), the workers, the inference engines and the generator, which need GPUs. In place of weights the
workers have a chain of hashes; engines answer with what the weights that they were sent give.
It prints the chain and what each step was trained on.
"""

from __future__ import annotations

import sys
import typing
from pathlib import Path
from types import ModuleType, SimpleNamespace

import share
import typing_extensions
from in_process_ray import SIZE, Device, Handle, chain, use_ray_in_process, write_phases

STEPS, BATCH, LENGTH = 4, 2, 8


def numbers(state: str, *things: object) -> list[int]:
    return [int(digit, 16) for digit in chain(state, *things)[:LENGTH]]


class Worker:
    """A policy or a reference: model and optimizer on the device or not."""

    def __init__(self, role: str, pool: str, device: Device) -> None:
        self.role, self.pool, self.device = role, pool, device
        self.state, self.grads = chain(device.name), ""
        self.batches: list[str] = []
        self.engines: Engines | None = None

    def init_model(self, *_, **__):
        self.backload_to_gpu()

    def backload_to_gpu(self, backload_optimizer=True, backload_model=True):
        for is_wanted, thing in ((backload_model, "model"), (backload_optimizer, "optimizer")):
            if is_wanted and (thing, self.role) != ("optimizer", "ref"):
                self.device.put(self.pool, f"{self.role}'s {thing}", SIZE // 10)

    def offload_to_cpu(self, offload_optimizer=True, offload_model=True):
        for is_wanted, thing in ((offload_model, "model"), (offload_optimizer, "optimizer")):
            if is_wanted:
                self.device.put(self.pool, f"{self.role}'s {thing}", 0)

    def forward(self, data, **_):
        from skyrl.backends.skyrl_train.distributed.dispatch import WorkerOutput

        self.device.compute(self.pool, f"{self.role}'s model", "forward")
        rows = [numbers(self.state, row.tolist()) for row in data["sequences"]]
        width = data.metadata["response_length"]
        return WorkerOutput(
            loss_fn_outputs=[{"logprobs": [-one / 16 for one in (row * width)[:width]]} for row in rows]
        )

    def forward_backward(self, data, **_):
        from skyrl.backends.skyrl_train.distributed.dispatch import WorkerOutput

        self.device.compute(self.pool, "policy's model", "forward_backward")
        keys = ("sequences", "advantages", "action_log_probs", "base_action_log_probs")
        self.batches.append(chain("", *[data[key].tolist() for key in keys]))
        self.grads = chain(self.grads, self.batches[-1])
        return WorkerOutput(metrics={"policy_loss": 0.0})

    def optim_step(self):
        self.device.compute(self.pool, "policy's optimizer", "optim_step")
        self.state, self.grads = chain(self.state, self.grads), ""
        return 1.0

    def init_weight_sync_state(self, engines, *_):
        self.engines = engines

    def broadcast_to_inference_engines(self, *_, **__):
        self.device.compute(self.pool, "policy's model", "broadcast")
        self.engines.load(self.state)

    def save_checkpoint(self, ckpt_dir, **_):
        self.device.compute(self.pool, "policy's optimizer", "save_checkpoint")

    def get_ray_node_id(self):
        return "here"

    def __getattr__(self, name):
        if name not in ("save_memory_snapshot", "empty_cache", "finalize_pending_saves", "_set_pad_token_id"):
            raise AttributeError(name)
        return lambda *_, **__: None


class Engines:
    """What the client of the inference engines does; asleep at level 2, weights are lost."""

    def __init__(self, pool: str, device: Device) -> None:
        self.pool, self.device, self.state = pool, device, ""
        self.version = 0
        self._set(True)

    def _set(self, *are_awake: bool) -> None:
        for is_awake, thing in zip(are_awake * 2, ("weights", "kv_cache"), strict=False):
            self.device.put(self.pool, f"engine's {thing}", SIZE // 10 if is_awake else 0)

    async def sleep(self, level: int = 2, tags=None) -> None:
        self._set(False)
        if level == 2:
            self.state = ""

    async def wake_up(self, tags=("weights", "kv_cache")) -> None:
        for tag in tags:
            self.device.put(self.pool, f"engine's {tag}", SIZE // 10)

    async def is_sleeping(self) -> bool:
        return not self.device.lies(self.pool, "engine's weights")

    async def pause_generation(self) -> None: ...

    async def resume_generation(self) -> None: ...

    def increment_weight_version(self) -> None:
        self.version += 1

    def load(self, state: str) -> None:
        self.device.compute(self.pool, "engine's weights", "receive")
        self.state = state

    def answer(self, prompt: object, what: str) -> list[int]:
        self.device.compute(self.pool, "engine's kv_cache", what)
        assert self.state, "an engine without weights"
        return numbers(self.state, prompt)


class Generator:
    def __init__(self, engines: Engines) -> None:
        self.engines = engines

    async def generate(self, batch):
        what = "generate" if batch["batch_metadata"].training_phase == "train" else "evaluate"
        responses = [self.engines.answer(prompt, what) for prompt in batch["prompts"]]
        return {
            "prompt_token_ids": [[1, 2] for _ in responses],
            "response_ids": responses,
            "rewards": [float(sum(response)) for response in responses],
            "loss_masks": [[1] * len(response) for response in responses],
            "stop_reasons": ["stop"] * len(responses),
            "rollout_metrics": None,
            "rollout_logprobs": None,
        }


class Prompts(list):
    def collate_fn(self, rows):
        return rows


def prompts(count: int) -> Prompts:
    return Prompts(
        {
            "prompt": [{"role": "user", "content": str(at)}],
            "env_class": "x",
            "env_extras": {"data_source": "x"},
            "uid": str(at),
        }
        for at in range(count)
    )


def config(folder: Path, is_colocated: bool):
    from skyrl.train.config import SkyRLTrainConfig

    cfg = SkyRLTrainConfig()
    trainer = cfg.trainer
    trainer.placement.colocate_all = is_colocated
    trainer.placement.colocate_policy_ref = False
    for role in ("policy", "ref", "critic"):
        setattr(trainer.placement, f"{role}_num_gpus_per_node", 1)
    cfg.generator.inference_engine.num_engines = cfg.generator.inference_engine.tensor_parallel_size = 1
    cfg.generator.inference_engine.enable_ray_prometheus_stats = trainer.enable_ray_gpu_monitor = False
    cfg.data.dataloader.num_workers, cfg.data.dataloader.persistent_workers = 0, False
    if not is_colocated:
        cfg.generator.inference_engine.engine_init_kwargs = {"enable_sleep_mode": True}
    trainer.algorithm.use_kl_loss = True
    trainer.train_batch_size = trainer.policy_mini_batch_size = trainer.eval_batch_size = BATCH
    cfg.generator.n_samples_per_prompt = 2
    trainer.epochs, trainer.eval_interval, trainer.eval_before_train = 1, 2, False
    trainer.ckpt_interval, trainer.hf_save_interval, trainer.dump_eval_results = 3, -1, False
    trainer.ckpt_path, trainer.export_path, trainer.resume_mode = str(folder / "ckpt"), str(folder / "export"), "none"
    trainer.update_epochs_per_batch = 1
    return cfg


def main(name: str, record: Path, is_colocated: bool, stall: str) -> None:
    typing.TypedDict = typing_extensions.TypedDict  # pydantic takes SkyRL's schemas without this from Python 3.12 on
    use_ray_in_process()
    workers = ModuleType("skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker")
    workers.PolicyWorker, workers.CriticWorker, workers.RefWorker = "policy", "critic", "ref"
    sys.modules[workers.__name__] = workers
    from skyrl.backends.skyrl_train.distributed.dispatch import ActorInfo, MeshRank
    from skyrl.backends.skyrl_train.workers import worker as groups
    from skyrl.train import trainer as trainers
    from skyrl.train.entrypoints.main_base import BasePPOExp

    device = Device(name, record, stall)
    write_phases(share, device)
    pool_of = {"rollout": "gpu0" if is_colocated else "rollout", "train": "gpu0" if is_colocated else "train"}
    made = {}

    def initiate(group, *_):
        role = group.ray_actor_type
        made[role] = Worker(role, pool_of["train"], device)
        handle = Handle(made[role])
        group._actor_handlers = [handle]
        group.actor_infos = [ActorInfo(handle, MeshRank(dp=0, sp=0, tp=0, pp=0, world_size=1, dp_size=1, pp_size=1))]

    groups.PPORayActorGroup._initiate_actors = initiate
    trainers.configure_ray_worker_logging = lambda: None
    trainers.run_on_each_node = lambda *_, **__: None

    class Exp(BasePPOExp):
        def __init__(self, cfg) -> None:  # without a tokenizer from the Hub and datasets from files
            self.cfg = cfg
            self.tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=0, decode=str, batch_decode=lambda x, **_: x)
            self.train_dataset, self.eval_dataset = prompts(STEPS * BATCH), prompts(BATCH)
            self.colocate_pg = None

        def get_inference_client(self):
            engines = Engines(pool_of["rollout"], device)
            if is_colocated:
                engines._set(False)
            self._server_groups = [SimpleNamespace(get_actors=lambda: [Handle(engines)])]
            return engines

        def get_generator(self, cfg, tokenizer, inference_engine_client):
            return Generator(inference_engine_client)

        def get_tracker(self):
            return SimpleNamespace(log=quiet, finish=quiet, log_exception=quiet)

        def get_trajectory_logger(self):
            return None

    def quiet(*_, **__) -> None: ...

    exp = share.skyrl_experiment(Exp)(config(record.parent / name, is_colocated))
    exp.run()
    print("ENDS", made["policy"].state, *made["policy"].batches, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "one", sys.argv[4])
