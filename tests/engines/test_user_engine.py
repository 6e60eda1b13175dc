"""Rollout engines that users wrote: made by name, held to the protocol, and tried as every engine is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from rlmux.core.errors import PipelineError, UserError
from rlmux.engines.determinism_probe import probe_rollout
from rlmux.engines.rollout.slot_engine import SlotRolloutEngine
from rlmux.engines.user_engine import make_user_engine
from rlmux.rl.config import EngineConfig, ModelConfig, RolloutConfig, TrainingConfig
from rlmux.rl.determinism_class import DeterminismClass, determinism_class_of
from rlmux.rl.user_code.engine_check import check_engine

TINY = ModelConfig(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=16)
OWN = """
class Lean:
    def __init__(self, config, *, vocab_size, is_single_turn, device):
        self.args = config.rollout.engine.args

def raising(config, **rest):
    return 1 / 0
"""


class Wrapped:
    """An engine that is no subclass of ours: everything is passed on."""

    def __init__(self, config: TrainingConfig, *, vocab_size: int, is_single_turn: bool, device: str) -> None:
        self._ours = SlotRolloutEngine(
            config.model, config.rollout, vocab_size=vocab_size, seed=0, is_single_turn=is_single_turn, device=device
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ours, name)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_engines.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_engines", raising=False)


def config(name: str, **engine: Any) -> TrainingConfig:
    rollout = RolloutConfig(num_slots=4, max_new_tokens=8, engine=EngineConfig(name=name, **engine))
    return TrainingConfig(name="a", model=TINY, rollout=rollout)


def make(name: str) -> Any:
    return make_user_engine(config(name), vocab_size=97, is_single_turn=True, device="cpu")


def test_an_engine_that_is_none_of_ours_is_made_and_its_promise_is_found_by_trying_it():
    engine = make(f"{__name__}:Wrapped")
    assert determinism_class_of(probe_rollout(engine, num_trajectories=4).checks) is not DeterminismClass.STATISTICAL


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("own_engines:Lean", "rollout.engine: own_engines:Lean made a Lean without version, limits, "),
        ("own_engines:raising", "rollout.engine: own_engines:raising raised ZeroDivisionError: division by zero"),
    ],
)
def test_what_is_no_engine_is_told_in_one_line(own, name, told):
    with pytest.raises(PipelineError) as refused:
        make(name)
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_name_that_nothing_answers_to_and_keys_that_do_not_fit_are_refused(own):
    with pytest.raises(UserError, match="name: unknown; accepted: rlmux, vllm, sglang, "):
        EngineConfig(name="vlm")
    with pytest.raises(UserError, match="does not go with an engine of your own"):
        EngineConfig(name="own_engines:Lean", python="/usr/bin/python3")
    with pytest.raises(UserError, match="engine 'own_engines:Own': 'own_engines' has no 'Own'; it has: Lean, raising"):
        check_engine(EngineConfig(name="own_engines:Own"), TINY)
    assert check_engine(EngineConfig(name="own_engines:Lean", args=("x",), memory_gb=2.0), TINY) is None
