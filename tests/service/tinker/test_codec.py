"""The codec against the SDK's own messages, both ways."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from rlmux.core.errors import UserError
from rlmux.rl.client_requests import ForwardBackwardDone, SampleDone, SampledSequence
from rlmux.service.tinker import wire_pb2 as wire
from rlmux.service.tinker.codec import (
    read_forward_backward,
    read_head,
    read_or_complain,
    write_forward_backward,
    write_sample,
)

SOURCE = Path(wire.__file__).parents[3]

tokens = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20)
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


def test_the_generated_messages_are_those_of_the_proto_file(tmp_path):
    pytest.importorskip("grpc_tools")
    proto = SOURCE / "rlmux" / "service" / "tinker" / "wire.proto"
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", f"-I{SOURCE}", f"--python_out={tmp_path}", str(proto)], check=True
    )
    made = (tmp_path / "rlmux" / "service" / "tinker" / "wire_pb2.py").read_text(encoding="utf-8")
    assert serialized(made) == serialized(Path(wire.__file__).read_text(encoding="utf-8"))


def serialized(text: str) -> str:
    """The line that describes all messages; others carry the generator's version."""
    return next(line for line in text.splitlines() if "AddSerializedFile" in line)


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.tuples(tokens, tokens), min_size=1, max_size=4), st.dictionaries(st.text(max_size=5), floats))
def test_a_request_of_the_sdk_is_read_as_it_was_meant(pairs, config):
    pb = pytest.importorskip("tinker.proto.tinker_public_pb2")
    message = pb.ForwardBackwardRequest(model_id="s:train:0", seq_id=3, loss_fn="ppo", forward_only=True)
    for inputs, values in pairs:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.array(inputs, dtype="<i4").tobytes()
        for name, dtype, number in (("target_tokens", "<i8", 2), ("advantages", "<f4", 1)):
            array = np.array(values, dtype=dtype)
            datum.loss_fn_inputs[name].CopyFrom(pb.Tensor(dense=array.tobytes(), dtype=number, shape=[len(values)]))
    for key, value in config.items():
        message.loss_fn_config_v2[key].number = value
    body = message.SerializeToString()
    assert read_head(body) == ("s:train:0", 3, True, sum(len(inputs) for inputs, _ in pairs))
    read = read_forward_backward(body)
    assert (read.loss, read.is_forward_only, read.config) == ("ppo", True, config)
    for datum, (inputs, values) in zip(read.datums, pairs, strict=True):
        assert datum.tokens.tolist() == inputs
        assert datum.inputs["target_tokens"].tolist() == values
        assert datum.inputs["advantages"].dtype == np.float32


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.lists(floats, min_size=1, max_size=9), max_size=5), floats)
def test_the_sdk_reads_our_training_answer(logprobs, loss):
    pb = pytest.importorskip("tinker.proto.tinker_public_pb2")
    arrays = [np.array(each, dtype=np.float32) for each in logprobs]
    message = pb.ForwardBackwardOutput()
    message.ParseFromString(write_forward_backward(ForwardBackwardDone(logprobs=arrays, loss=loss, num_tokens=1)))
    field = message.loss_fn_outputs[0].fields["logprobs"]
    offsets = np.frombuffer(field.offsets, dtype="<i8")
    found = [np.frombuffer(field.data[a:b], dtype="<f4").tolist() for a, b in pairwise(offsets)]
    assert found == [array.tolist() for array in arrays]
    assert dict(message.metrics) == {"loss:sum": loss}


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.tuples(tokens, st.sampled_from(["stop", "length"])), max_size=4), st.integers(0, 5))
def test_the_sdk_reads_our_samples(sequences, num_scored):
    pb = pytest.importorskip("tinker.proto.tinker_public_pb2")
    done = SampleDone(
        id="x",
        sequences=[
            SampledSequence(tokens=each, logprobs=[-0.5] * len(each), stop_reason=reason) for each, reason in sequences
        ],
        prompt_logprobs=[-1.0] * num_scored,
    )
    message = pb.SampleResponse()
    message.ParseFromString(write_sample(done, 6))
    names = [pb.StopReason.Name(each.stop_reason) for each in message.sequences]
    assert names == [f"STOP_REASON_{reason.upper()}" for _, reason in sequences]
    assert [np.frombuffer(each.tokens, "<i4").tolist() for each in message.sequences] == [t for t, _ in sequences]
    scored = np.frombuffer(message.prompt_logprobs, "<f4")
    assert np.isnan(scored).sum() == 6 - num_scored
    assert np.isnan(scored[0])


def request(**changes: Any) -> bytes:
    datum = wire.Datum()
    datum.model_input.add().encoded_text.tokens = np.array([1, 2], dtype="<i4").tobytes()
    changes.get("change", lambda one: None)(datum)
    return wire.ForwardBackwardRequest(model_id="m", data=[datum]).SerializeToString()


def add_image(datum: wire.Datum) -> None:
    datum.model_input.add().image.SetInParent()


def add_sparse(datum: wire.Datum) -> None:
    datum.loss_fn_inputs["weights"].sparse_csr.values = b"1234"


def add_matrix(datum: wire.Datum) -> None:
    datum.loss_fn_inputs["weights"].CopyFrom(wire.Tensor(dense=bytes(16), dtype=wire.DTYPE_FLOAT32, shape=[2, 2]))


def add_half(datum: wire.Datum) -> None:
    datum.loss_fn_inputs["weights"].CopyFrom(wire.Tensor(dense=bytes(3), dtype=wire.DTYPE_FLOAT32))


def add_bfloat(datum: wire.Datum) -> None:
    datum.loss_fn_inputs["weights"].CopyFrom(wire.Tensor(dense=bytes(4), dtype=wire.DTYPE_BFLOAT16))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (add_image, "a chunk of image is not served"),
        (add_sparse, r"loss_fn_inputs\['weights'\] is sparse"),
        (add_matrix, r"has shape \[2, 2\] for 4 values"),
        (add_half, "3 bytes are no whole number of values"),
        (add_bfloat, "has dtype DTYPE_BFLOAT16"),
    ],
)
def test_what_is_not_served_is_refused_by_name(change, text):
    body = request(change=change)
    with pytest.raises(UserError, match=text) as refused:
        read_forward_backward(body)
    assert read_or_complain(body).complaint == str(refused.value)


@pytest.mark.parametrize("body", [b"\xff\xff", b"{}", b"\x0a\x7f"])
def test_bytes_that_are_no_request_are_refused(body):
    with pytest.raises(UserError, match=r"not a protobuf request|no datum"):
        read_forward_backward(body)
