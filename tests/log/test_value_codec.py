"""The codec gives back what it was given, and names what it does not know."""

from __future__ import annotations

import dataclasses
import json
import math
import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from rlmux.core.actions import Action, Admit, Release, RunStage, Switch
from rlmux.core.errors import LogError
from rlmux.core.events import Event, NodeJoined, NodeLost, PipelineSubmitted, StageFinished
from rlmux.core.model import (
    ARRIVING_KINDS,
    QUEUED,
    AdmissionKind,
    DeviceId,
    NodeId,
    PhaseSeconds,
    Pipeline,
    PipelineId,
    Placement,
    Stage,
    Urgency,
)
from rlmux.log.value_codec import decode, dumps, encode, loads

EVERY_TYPE = typing.get_args(Event) + typing.get_args(Action)

st.register_type_strategy(float, st.floats(allow_nan=False, min_value=1.0))
st.register_type_strategy(int, st.integers(min_value=1, max_value=2**53))
st.register_type_strategy(
    Pipeline,
    st.one_of(
        st.builds(
            Pipeline,
            work_arrives=st.just(False),
            urgency=st.sampled_from(QUEUED),
            stages=st.lists(st.sampled_from(Stage)).map(lambda stages: (*stages, Stage.UPDATE)),
            slo_probability=st.none() | st.floats(0.01, 0.99),
            **{
                field.name: st.from_type(typing.get_type_hints(Pipeline)[field.name])
                for field in dataclasses.fields(Pipeline)
                if field.name not in ("work_arrives", "urgency", "stages", "slo_probability")
            },
        ),
        st.builds(
            Pipeline,
            id=st.text(),
            num_steps=st.none(),
            urgency=st.just(Urgency.FILLER),
            stages=st.just((Stage.GENERATE,)),
        ),
        st.builds(Pipeline, id=st.text(), num_steps=st.none(), work_arrives=st.just(True)),
    ),
)
KINDS = {"phases": st.sampled_from(ARRIVING_KINDS), "usd_per_gpu_hour": st.floats(0.0, 1e6)}
"""Fields that do not take every value of their type."""


@pytest.mark.parametrize("kind", EVERY_TYPE, ids=lambda kind: kind.__name__)
def test_every_event_and_action_survives_the_round_trip(kind: type) -> None:
    @settings(max_examples=examples(25), deadline=None)
    @given(
        st.builds(
            kind,
            **{
                f.name: KINDS.get(f.name, st.from_type(typing.get_type_hints(kind)[f.name]))
                for f in dataclasses.fields(kind)
            },
        )
    )
    def check(value: Event | Action) -> None:
        text = encode(value)
        assert decode(text) == value
        assert encode(decode(text)) == text
        json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))

    check()


def test_text_is_compact_tagged_and_stable() -> None:
    event = StageFinished(time_s=2.5, order=7, seconds=0.25, tokens=64)
    assert encode(event) == (
        '{"type":"StageFinished","time_s":2.5,"order":7,"seconds":0.25,"switch_s":0.0,"tokens":64,"prefill_s":0.0,"batches":[],"decoded":[]}'
    )


def test_ids_enums_and_infinity_come_back_as_themselves() -> None:
    order = RunStage(
        order=3,
        pipeline="sort",
        step=1,
        stage=Stage.GENERATE,
        devices=(DeviceId("rollout", 0, 1),),
        weight_version=0,
        switch=Switch.WARM,
    )
    back = decode(encode(order))
    assert isinstance(back, RunStage)
    assert type(back.devices[0]) is DeviceId
    assert back.stage is Stage.GENERATE
    assert back.switch is Switch.WARM

    admit = Admit(
        pipeline="sort",
        placement=Placement(group=1, rollout_nodes=(NodeId("rollout", 0),), train_nodes=()),
        kind=AdmissionKind.NEW,
    )
    assert decode(encode(admit)) == admit

    submitted = PipelineSubmitted(
        time_s=0.0,
        pipeline=Pipeline(id="sort", num_steps=None, estimate=PhaseSeconds(rollout_s=1.0, train_s=2.0)),
    )
    back = decode(encode(submitted))
    assert back == submitted
    assert back.pipeline.slo_slowdown == math.inf


def test_unknown_type_is_named() -> None:
    with pytest.raises(LogError, match="unknown event or action type 'StageTeleported'"):
        decode('{"type":"StageTeleported","time_s":1.0}')


def test_unknown_field_is_named() -> None:
    with pytest.raises(LogError, match="unknown field 'colour' of NodeLost"):
        decode('{"type":"NodeLost","time_s":1.0,"node":["a",0],"colour":"red"}')


def test_fields_that_are_gone_and_decided_nothing_are_passed_over() -> None:
    assert decode('{"type":"Release","pipeline":"a","saved_usd":0.95}') == Release(pipeline=PipelineId("a"))
    placement = '{"group":1,"rollout_nodes":[["r",0]],"train_nodes":[["t",0]]}'
    dollars = '"saves_usd_per_hour":2.0,"expected_saving_usd":1.2,"saved_usd":null'
    old = f'{{"type":"Relocate","pipeline":"a","placement":{placement},"expected_step_s":3.5,{dollars}}}'
    assert decode(old) == decode(old.replace(f",{dollars}", ""))
    with pytest.raises(LogError, match="unknown field 'saved_usd' of Admit"):
        decode(f'{{"type":"Admit","pipeline":"a","placement":{placement},"kind":"new","saved_usd":1.0}}')


def test_missing_field_is_named_unless_it_has_a_default() -> None:
    with pytest.raises(LogError, match="NodeLost lacks its field 'node'"):
        decode('{"type":"NodeLost","time_s":1.0}')
    assert decode('{"type":"StageFinished","time_s":1.0,"order":1,"seconds":1.0}') == StageFinished(
        time_s=1.0, order=1, seconds=1.0
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"type":"NodeLost","time_s":"soon","node":["a",0]}', "NodeLost.time_s is 'soon'"),
        ('{"type":"NodeLost","time_s":1.0,"node":["a"]}', r"NodeLost.node is \['a'\]"),
        ('{"type":"StageFinished","time_s":1.0,"order":1.5,"seconds":1}', "StageFinished.order is 1.5"),
        ("[1]", "not an event or action"),
        ("{", "not JSON"),
    ],
)
def test_wrong_value_is_told_with_its_place(text: str, told: str) -> None:
    with pytest.raises(LogError, match=told):
        decode(text)


def test_wrong_enum_value_names_what_is_accepted() -> None:
    text = encode(NodeLost(time_s=0.0, node=NodeId("a", 0)))
    assert decode(text) == NodeLost(time_s=0.0, node=NodeId("a", 0))
    with pytest.raises(LogError, match="one of direct, scaled, new"):
        decode(
            '{"type":"Admit","pipeline":"a","kind":"magic","placement":{"group":1,"rollout_nodes":[],"train_nodes":[]}}'
        )


def test_values_of_other_kinds_are_refused() -> None:
    with pytest.raises(LogError, match="neither an event nor an action"):
        encode(Stage.UPDATE)  # type: ignore[arg-type]
    with pytest.raises(LogError, match="cannot hold a object"):
        dumps({"a": object()})


def test_free_form_numbers_outside_json_read_back_with_float() -> None:
    class Scalar:
        def item(self) -> float:
            return math.nan

    fields = loads(dumps({"loss": math.nan, "kl": -math.inf, "deep": [{"x": math.inf}], "scalar": Scalar()}))
    assert math.isnan(float(fields["loss"]))
    assert float(fields["kl"]) == -math.inf
    assert float(fields["deep"][0]["x"]) == math.inf
    assert math.isnan(float(fields["scalar"]))


def test_a_time_keeps_every_bit() -> None:
    joined = NodeJoined(time_s=0.1 + 0.2, node=NodeId("rollout", 0))
    assert decode(encode(joined)) == joined


def test_a_device_that_was_read_before_does_not_hide_a_wrong_one() -> None:
    joined = NodeJoined(time_s=1.0, node=NodeId("rollout", 1))
    assert decode(encode(joined)) == joined
    for node in ('["rollout",true]', '["rollout",1.0]', '["rollout",[1]]', '["rollout",{}]'):
        with pytest.raises(LogError, match="in the log"):
            decode(f'{{"type":"NodeJoined","time_s":1.0,"node":{node}}}')
