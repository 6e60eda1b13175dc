"""The adapters for verl and slime, against programs of the shape of their hooks, and what AReaL's refuses.

Of the real ones: test_verl.py, test_areal.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from types import SimpleNamespace

import pytest
from tests.broker.room import HERE, PATIENCE_S, SHARE_FOLDER, Room, check_never_both

from rlmux import share

STEPS = 8


def start_driver(room: Room, name: str, *, is_shared: bool = True) -> subprocess.Popen[str]:
    environ = {"PATH": os.environ.get("PATH", ""), "PYTHONPATH": str(SHARE_FOLDER), "RLMUX_JOB": name}
    if is_shared:
        environ["RLMUX_BROKER"] = f"unix:{room.socket}"
    words = [name, str(STEPS), str(room.record), str(room.folder / "go")]
    program = subprocess.Popen(
        [sys.executable, "-S", str(HERE / "fake_verl_program.py"), *words],
        env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    room.programs.append(program)
    return program


def told(program: subprocess.Popen[str]) -> str:
    out, err = program.communicate(timeout=PATIENCE_S)
    assert program.returncode == 0, err
    return out


def woken(room: Room, name: str) -> list[str]:
    return [what for _, _, what, _ in room.recorded_by(name) if what.startswith("wakes")]


def test_drivers_of_verls_shape_take_turns_by_phase_and_wake_with_the_weights_they_had(room):
    (room.folder / "go").touch()
    told(start_driver(room, "a", is_shared=False))
    alone = list(dict.fromkeys(woken(room, "a")))
    assert alone == [f"wakes {step}" for step in range(STEPS + 1)]
    room.record.unlink()
    (room.folder / "go").unlink()
    room.start_broker()
    programs = [start_driver(room, name) for name in "ab"]
    room.until(lambda: {note["pipeline"] for note in room.notes("joined")} == {"a", "b"}, "both programs")
    (room.folder / "go").touch()
    for program in programs:
        out = told(program)
        assert out.strip().endswith("accepted: actor_rollout_ref.actor.fsdp_config.optimizer_offload=True")
    room.until_noted("gone", 2)
    check_never_both(room.recorded())
    for name in "ab":
        assert list(dict.fromkeys(woken(room, name))) == alone
        phases = [note["phase"] for note in room.notes("granted") if note["pipeline"] == name]
        assert phases == ["train", *(["rollout", "train", "rollout", "train", "rollout"] * (STEPS // 2))]


def test_verls_plug_in_is_an_entry_point_of_the_package():
    project = tomllib.loads((HERE.parent.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["verl.plugins"] == {"rlmux": "rlmux.share_verl"}


class Regions:
    """A job that writes down which pools its phases take and give back."""

    def __init__(self) -> None:
        self.said: list[tuple[str, ...]] = []

    def phase(self, role, also=()):
        regions, roles = self.said, (role, *also)

        class Region:
            def __enter__(self):
                regions.append(("take", *roles))

            def __exit__(self, *_):
                regions.append(("give back", *roles))

        return Region()


def test_slimes_phases_take_the_pools_of_their_roles_in_order():
    job = Regions()
    callback = share.slime(job)
    for phase, role in (("generate", "sampler"), ("train", "trainer"), ("update_weights", "both")):
        callback.on_phase_begin(phase, role)
        callback.on_phase_end(phase, role)
    assert job.said == [
        ("take", "rollout"),
        ("give back", "rollout"),
        ("take", "train"),
        ("give back", "train"),
        ("take", "train", "rollout"),
        ("give back", "train", "rollout"),
    ]


def test_a_phase_of_slime_that_is_out_of_order_or_unknown_is_named():
    callback = share.slime(Regions())
    with pytest.raises(ValueError, match="role 'critic' of phase 'train'; accepted: sampler, trainer, both"):
        callback.on_phase_begin("train", "critic")
    callback.on_phase_begin("generate", "sampler")
    with pytest.raises(ValueError, match="accepted: the one that began last"):
        callback.on_phase_end("train", "trainer")


class ArealTrainer:
    """What the adapter looks at before anything is made."""

    def __init__(self, config):
        raise AssertionError("made in spite of its settings")

    def train(self): ...

    def _evaluate_fn(self): ...

    def _is_actor_rollout_colocated(self, config):
        return config.is_colocated


class SharedJob(Regions):
    is_shared = True
    pools = {"rollout": "h20", "train": "h800"}  # noqa: RUF012


def areal_config(backend="vllm:d1", is_colocated=False, **flags):
    vllm = SimpleNamespace(enable_sleep_mode=True)
    sglang = SimpleNamespace(enable_memory_saver=False)
    rollout = SimpleNamespace(backend=backend)
    return SimpleNamespace(
        **{"enable_offload": True, **flags}, rollout=rollout, vllm=vllm, sglang=sglang, is_colocated=is_colocated
    )


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (areal_config(enable_offload=False), "enable_offload is not set: .*; accepted: enable_offload=true"),
        (areal_config("sglang:d1"), "sglang.enable_memory_saver is not set: .*; accepted: sglang.enable_memory_saver"),
        (areal_config(is_colocated=True), "actor and rollout are colocated; accepted: one pool for both"),
    ],
)
def test_an_areal_trainer_whose_memory_could_not_leave_is_refused_without_a_permit(config, complaint):
    job = SharedJob()
    with pytest.raises(TypeError, match=complaint):
        share.areal(ArealTrainer, job)(config)
    assert job.said == []


def test_an_areal_driver_for_each_rank_is_refused(monkeypatch):
    monkeypatch.setenv("AREAL_SPMD_MODE", "1")
    with pytest.raises(TypeError, match=r"AREAL_SPMD_MODE is set: .*; accepted: the single controller"):
        share.areal(ArealTrainer, SharedJob())(areal_config())


def test_a_class_without_areals_methods_is_refused_with_the_versions():
    with pytest.raises(TypeError, match=r"Regions of AReaL that is not installed has no train, .*accepted: AReaL 1\.0"):
        share.areal(Regions, SharedJob())


def test_an_areal_trainer_that_shares_nothing_stays_the_class_it_is():
    assert share.areal(ArealTrainer, share.join("a")) is ArealTrainer
