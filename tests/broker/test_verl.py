"""Jobs of the real verl under the broker: its own command, driver, trainers and FSDP2 on cores. `make test-verl`.

Only the rollout server is not verl's: see verl_on_cores.py. verl has an environment of its own; RLMUX_VERL_PYTHON names
its Python. Without it these tests are left out.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import pytest
from tests import waiting
from tests.broker.room import HERE, SHARE_FOLDER, Room, check_never_both

PYTHON = os.environ.get("RLMUX_VERL_PYTHON", "")
LIMIT_S = 900
STEPS = 4
SIZE = 362_752
"""Bytes of the model."""
ONE_POOL = {"gpu0": {"phase": "both", "device_memory_gb": 1.5 * SIZE / 1e9}}
TWO_POOLS = {
    "gpu0": {"phase": "rollout", "device_memory_gb": 1.5 * SIZE / 1e9},
    "gpu1": {"phase": "train", "device_memory_gb": 1.5 * SIZE / 1e9},
}
SEPARATE = (
    "actor_rollout_ref.hybrid_engine=False",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=cores",
    "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=verl_on_cores",
    "trainer.v1.separate_async.parameter_sync_step=1",
    "trainer.v1.separate_async.num_warmup_batches=0",
)

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="RLMUX_VERL_PYTHON names no Python with verl: make test-verl"),
    pytest.mark.xdist_group("verl"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp(name) for name in "abc"}
    for seed, folder in enumerate(folders.values()):
        subprocess.run([PYTHON, HERE / "verl_model.py", folder, str(seed)], check=True, capture_output=True)
    return folders


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> dict[str, list[str]]:
    """Weights that the servers of each job get, step after step, under verl's own `sync`."""
    room = Room(tmp_path_factory.mktemp("alone"))
    end_well(room, {name: start(room, name, models[name], "sync", is_shared=False) for name in "ab"})
    return {name: weights_of(room, name) for name in "ab"}


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    room = Room(tmp_path, ONE_POOL)
    yield room
    room.end()


@pytest.fixture
def room_of_two(tmp_path: Path) -> Iterator[Room]:
    room = Room(tmp_path, TWO_POOLS)
    yield room
    room.end()


def start(
    room: Room, name: str, model: Path, mode: str, *options: str, is_shared: bool = True, hangs_in: str = ""
) -> subprocess.Popen[str]:
    """verl's own command, as a user has it."""
    environ = {
        **os.environ,
        "PYTHONPATH": f"{SHARE_FOLDER}:{HERE}",
        "VERL_USE_EXTERNAL_MODULES": "verl_on_cores,share_verl",
        "OMP_NUM_THREADS": "1",
        "RLMUX_JOB": name,
        "RECORD": str(room.record),
        "HANGS_IN": hangs_in,
        "POOLS": '{"train": "gpu1"}' if "separate" in mode else "{}",
    }
    if is_shared:
        environ["RLMUX_BROKER"] = room.address
    words = [
        *SETTINGS,
        *options,
        f"trainer.v1.trainer_mode={mode}",
        f"trainer.default_local_dir={room.folder / name}",
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={model}/rows.parquet",
        f"data.val_files={model}/rows.parquet",
    ]
    with out_of(room, name).open("w") as log:
        program = subprocess.Popen(
            [PYTHON, "-m", "verl.trainer.main_ppo", *words],
            env=environ, cwd=room.folder, stdout=log, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    room.programs.append(program)
    return program


def out_of(room: Room, name: str) -> Path:
    return room.folder / f"{name}.out"


SETTINGS = (
    "algorithm.adv_estimator=grpo",
    "data.train_batch_size=4",
    "data.max_prompt_length=32",
    "data.max_response_length=8",
    "data.val_max_samples=4",
    "data.shuffle=False",
    "data.dataloader_num_workers=0",
    "actor_rollout_ref.model.use_remove_padding=False",
    "+actor_rollout_ref.model.override_config.attn_implementation=eager",
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.actor.use_torch_compile=False",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
    "actor_rollout_ref.actor.fsdp_config.param_offload=True",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.rollout.name=cores",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.full_determinism=True",
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "reward.num_workers=1",
    f"reward.custom_reward_function.path={HERE / 'verl_rewards.py'}",
    "reward.custom_reward_function.name=score",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    "trainer.device=cpu",
    "trainer.n_gpus_per_node=1",
    "trainer.logger=[console]",
    "trainer.val_before_train=True",
    "trainer.test_freq=2",
    "trainer.save_freq=2",
    f"trainer.total_training_steps={STEPS}",
    "trainer.resume_mode=disable",
    "ray_kwargs.ray_init.num_cpus=8",
    "+ray_kwargs.ray_init.num_gpus=2",
    "+ray_kwargs.ray_init.include_dashboard=False",
)


def end_well(room: Room, programs: Mapping[str, subprocess.Popen[str]]) -> None:
    for name, program in programs.items():
        assert program.wait(timeout=LIMIT_S) == 0, out_of(room, name).read_text()[-4000:]


def weights_of(room: Room, name: str) -> list[str]:
    """Digests of the weights that its servers were given, each once."""
    return list(dict.fromkeys(what for _, _, what, _ in room.recorded_by(name) if what.startswith("weights")))


def while_both_are_there(room: Room) -> list[tuple[float, str, str, int]]:
    """Lines until the last one of the job that ends first: what it had goes with its processes, without a line."""
    end_s = min(room.recorded_by(name)[-1][0] for name in "ab")
    return [line for line in room.recorded() if line[0] <= end_s]


def phases_of(room: Room, name: str) -> list[tuple[str, list[str]]]:
    return [(note["phase"], note["pools"]) for note in room.notes("granted") if note["pipeline"] == name]


def check_interleaved(room: Room) -> None:
    """Once both have begun, neither has the device for a whole step while the other waits."""
    granted = [note["pipeline"] for note in room.notes("granted") if note["phase"] == "rollout"]
    both = granted[granted.index("a" if granted[0] == "b" else "b") :]
    changes = sum(one != other for one, other in pairwise(both))
    assert changes >= STEPS, granted


def test_two_jobs_of_verl_share_a_device_by_phase_and_train_what_they_train_alone(room, models, alone):
    room.start_broker()
    end_well(room, {name: start(room, name, models[name], "rlmux") for name in "ab"})
    room.until_noted("gone", 2)
    check_never_both(while_both_are_there(room), room_for=SIZE)
    check_interleaved(room)
    assert alone["a"] != alone["b"]
    for name in "ab":
        shared = weights_of(room, name)
        assert shared == alone[name][: len(shared)]
        assert len(shared) == STEPS + 1
        phases = [phase for phase, _ in phases_of(room, name)]
        assert phases == ["train", "rollout", *steps_with_a_validation_each_second()]
        assert all(note["said_bye"] for note in room.notes("gone"))


def steps_with_a_validation_each_second() -> list[str]:
    return [
        phase for step in range(1, STEPS + 1) for phase in ("rollout", "train", *(["rollout"] if step % 2 == 0 else []))
    ]


def test_two_jobs_with_pools_of_their_own_for_each_phase_sample_while_the_other_trains(room_of_two, models, alone):
    room = room_of_two
    room.start_broker()
    end_well(room, {name: start(room, name, models[name], "rlmux_separate", *SEPARATE) for name in "ab"})
    room.until_noted("gone", 2)
    check_never_both(while_both_are_there(room), room_for=SIZE)
    for name in "ab":
        assert weights_of(room, name) == alone[name]
        phases = phases_of(room, name)
        assert phases[0] == ("train", ["gpu0", "gpu1"])
        assert phases[2:5] == [("rollout", ["gpu0"]), ("train", ["gpu1"]), ("train", ["gpu0", "gpu1"])]


def test_drivers_killed_in_each_phase_and_a_killed_broker_leave_the_third_to_end_as_alone(room, models, alone):
    room.start_broker()
    c = start(room, "c", models["c"], "rlmux", hangs_in="train")
    until_recorded(room, "c", "begins")
    b = start(room, "b", models["b"], "rlmux", hangs_in="rollout")
    a = start(room, "a", models["a"], "rlmux")
    kill_driver(room, "c")
    assert c.wait(LIMIT_S) != 0
    until_recorded(room, "b", "hangs")
    room.kill_broker()
    room.start_broker()
    kill_driver(room, "b")
    assert b.wait(LIMIT_S) != 0
    end_well(room, {"a": a})
    room.until_noted("gone", 3)
    assert {note["pipeline"]: note["said_bye"] for note in room.notes("gone")} == {"a": True, "b": False, "c": False}
    assert weights_of(room, "a") == alone["a"]
    assert room.status()["c"]["status"] == "failed"


def until_recorded(room: Room, name: str, what: str) -> None:
    """As the room's, with the patience that the start of verl takes."""
    waiting.until(lambda: room.has_recorded(name, what), f"{what!r} of {name}", limit_s=LIMIT_S, process=room.broker)


def kill_driver(room: Room, name: str) -> None:
    """The process that joined: verl's task runner, an actor of Ray."""
    (pid, _), *_ = [note["process"] for note in room.notes("joined") if note["pipeline"] == name]
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("mode", "options", "message"),
    [
        ("rlmux", ["actor_rollout_ref.actor.fsdp_config.param_offload=False"], "fsdp_config.param_offload=True"),
        ("rlmux", ["actor_rollout_ref.rollout.free_cache_engine=False"], "accepted: actor_rollout_ref.rollout.free_c"),
        ("rlmux_separate", [], "actor_rollout_ref.hybrid_engine is set"),
    ],
)
def test_a_job_whose_memory_would_stay_is_refused_before_its_workers_start(room, models, mode, options, message):
    program = start(room, "a", models["a"], mode, *options, is_shared=False)
    assert program.wait(LIMIT_S) != 0
    said = out_of(room, "a").read_text()
    assert message in said
    assert "WorkerDict" not in said
