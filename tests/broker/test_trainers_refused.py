"""What the adapters for TRL, SkyRL and OpenRLHF refuse before the start, each in one line, without the frameworks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rlmux import share
from rlmux.share_adapters import vllm_server_sleeps
from rlmux.share_openrlhf import _GENERATOR, _TRAINER
from rlmux.share_skyrl import _DISPATCH, _ENGINES
from rlmux.share_skyrl import _TRAINER as _SKYRL
from rlmux.share_trl import _IN_PROCESS, _TRL_METHODS, _VLLM_METHODS

ONE, TWO = ({"rollout": one, "train": "b"} for one in "ba")


def job(pools):
    return SimpleNamespace(is_shared=True, pools=pools)


def trl_trainer(mode="", **more):
    methods = dict.fromkeys(_TRL_METHODS, print)
    generation = SimpleNamespace(**dict.fromkeys((*_VLLM_METHODS, *_IN_PROCESS)))
    args = SimpleNamespace(vllm_enable_sleep_mode=mode != "colocate without sleep")
    vllm = {"use_vllm": bool(mode), "vllm_mode": mode.partition(" ")[0], "vllm_generation": generation}
    return SimpleNamespace(**{**methods, **vllm, "args": args, **more})


@pytest.mark.parametrize(
    ("trainer", "pools", "text"),
    [
        (trl_trainer(), TWO, 'generates on the devices that it trains on; accepted: one pool, or vllm_mode="server"'),
        (trl_trainer("colocate"), TWO, 'accepted: one pool, or vllm_mode="server"'),
        (trl_trainer("colocate without sleep"), ONE, "only with vllm_enable_sleep_mode=True"),
        (trl_trainer("server", rollout_func=print), TWO, "a rollout_func may call the server .*; accepted: one pool"),
        (
            trl_trainer("server", vllm_generation=None),
            ONE,
            r"has no sync_weights, generate; accepted: .*1\.14 to 1\.16",
        ),
        (trl_trainer(_generate_completions=print), ONE, "of ms-swift .*; accepted: TRL's trainers"),
    ],
)
def test_a_trl_trainer_whose_memory_could_not_leave_is_refused_with_what_is_accepted(trainer, pools, text):
    with pytest.raises(TypeError, match=text):
        share.trl(trainer, job(pools))


@pytest.mark.parametrize(
    ("url", "text"), [("http://127.0.0.1:9", "does not answer whether it sleeps"), ("nothing", "does not answer")]
)
def test_a_server_that_does_not_answer_is_refused_with_how_to_start_it(url, text):
    with pytest.raises(TypeError, match=f"{text}.*; accepted: vllm serve with VLLM_SERVER_DEV_MODE=1"):
        vllm_server_sleeps(url)


def skyrl_trainer(is_colocated=True, **engine):
    methods = {name: SimpleNamespace() for name in _SKYRL}
    engines = SimpleNamespace(engine_init_kwargs=engine)
    cfg = SimpleNamespace(generator=SimpleNamespace(inference_engine=engines))
    methods["dispatch"] = SimpleNamespace(**dict.fromkeys(_DISPATCH))
    methods["inference_engine_client"] = SimpleNamespace(**dict.fromkeys(_ENGINES))
    return SimpleNamespace(**methods, cfg=cfg, colocate_all=is_colocated)


@pytest.mark.parametrize(
    ("is_colocated", "pools", "text"),
    [
        (
            False,
            ONE,
            "placement.colocate_all=False and .*; accepted: trainer.placement.colocate_all=true with one pool",
        ),
        (True, TWO, "placement.colocate_all=True and .*; accepted: .*=false with a pool for each role"),
        (False, TWO, "accepted: generator.inference_engine.engine_init_kwargs.enable_sleep_mode=true"),
    ],
)
def test_a_skyrl_trainer_whose_memory_could_not_leave_is_refused_with_the_key(is_colocated, pools, text):
    with pytest.raises(TypeError, match=text):
        share.skyrl(skyrl_trainer(is_colocated), job(pools))


def test_a_skyrl_trainer_without_a_method_is_refused_with_both_versions():
    trainer = skyrl_trainer()
    del trainer.generate
    with pytest.raises(
        TypeError, match=r"of SkyRL .* has no generate; accepted: a RayPPOTrainer of SkyRL 0.3.0 and 0.4"
    ):
        share.skyrl(trainer, job(ONE))


class FullyAsyncRayPPOTrainer(SimpleNamespace):
    pass


def test_a_skyrl_trainer_that_generates_while_it_trains_is_refused():
    with pytest.raises(TypeError, match="accepted: RayPPOTrainer"):
        share.skyrl(FullyAsyncRayPPOTrainer(**vars(skyrl_trainer())), job(ONE))


def openrlhf_trainer(**off):
    args = {name: SimpleNamespace(colocate_all=True, enable_sleep=True) for name in ("train", "vllm", "ds")}
    for group, flag in off.items():
        setattr(args[group], flag, False)
    methods = {name: SimpleNamespace(**dict.fromkeys(_GENERATOR)) for name in _TRAINER}
    return SimpleNamespace(**methods, args=SimpleNamespace(**args))


@pytest.mark.parametrize(
    ("off", "pools", "text"),
    [
        ({}, TWO, "OpenRLHF lets engines sleep only with --train.colocate_all; accepted: one pool"),
        ({"train": "colocate_all"}, ONE, "accepted: --train.colocate_all"),
        ({"vllm": "enable_sleep"}, ONE, "accepted: --vllm.enable_sleep"),
        ({"ds": "enable_sleep"}, ONE, "accepted: --ds.enable_sleep"),
    ],
)
def test_an_openrlhf_trainer_whose_memory_could_not_leave_is_refused_with_the_option(off, pools, text):
    with pytest.raises(TypeError, match=text):
        share.openrlhf(openrlhf_trainer(**off), job(pools))


def test_an_openrlhf_trainer_without_a_method_is_refused_with_both_versions():
    trainer = openrlhf_trainer()
    del trainer.train_step
    with pytest.raises(
        TypeError, match=r"of OpenRLHF .* has no train_step; accepted: the PPOTrainer of OpenRLHF 0.11.2"
    ):
        share.openrlhf(trainer, job(ONE))


@pytest.mark.parametrize("adapter", [share.skyrl, share.openrlhf])
def test_without_a_broker_nothing_is_checked_and_nothing_is_wrapped(adapter, monkeypatch):
    monkeypatch.delenv("RLMUX_BROKER", raising=False)
    trainer = SimpleNamespace()
    assert adapter(trainer, share.join("a")) is trainer
    assert vars(trainer) == {}
