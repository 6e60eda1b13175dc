"""Between the bytes on the wire and the values of rl/client_requests.py.

    in the front            ForwardBackwardRequest ──▶ LossHead
    in a model's worker     ForwardBackwardRequest ──▶ ForwardBackward
                            ForwardBackwardDone, SampleDone ──▶ ForwardBackwardOutput, SampleResponse

The messages are those of wire.proto. What cannot be read, or is not served, is a UserError that names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from rlmux.core.errors import UserError
from rlmux.rl.client_requests import Datum, ForwardBackward, ForwardBackwardDone, SampleDone
from rlmux.rl.datum_losses import TARGETS
from rlmux.service.tinker import wire_pb2 as wire

_DTYPES = {wire.DTYPE_FLOAT32: "<f4", wire.DTYPE_INT64: "<i8", wire.DTYPE_INT32: "<i4"}
_STOP_REASONS = {"stop": wire.STOP_REASON_STOP, "length": wire.STOP_REASON_LENGTH}
_OUTPUT_TYPE = "ArrayRecord"
_TOKEN_BYTES = 4


class LossHead(NamedTuple):
    """What a front reads of a ForwardBackwardRequest."""

    model_id: str
    seq_id: int
    is_forward_only: bool
    num_tokens: int
    """Input tokens of all datums."""


def read_head(body: bytes) -> LossHead:
    """Raises UserError for bytes that are no ForwardBackwardRequest."""
    message = _parsed(body)
    num_bytes = sum(len(chunk.encoded_text.tokens) for datum in message.data for chunk in datum.model_input)
    return LossHead(message.model_id, message.seq_id, message.forward_only, num_bytes // _TOKEN_BYTES)


def write_head(body: bytes) -> bytes:
    """The request without its datums: `read_head` gives what it gives for the whole, but for the tokens."""
    message = _parsed(body)
    head = wire.ForwardBackwardRequest(model_id=message.model_id, seq_id=message.seq_id, loss_fn=message.loss_fn)
    head.forward_only = message.forward_only
    return head.SerializeToString(deterministic=True)


def read_or_complain(body: bytes) -> ForwardBackward:
    """The request of a body whose head was read; one that is not served holds nothing but what is wrong with it."""
    try:
        return read_forward_backward(body)
    except UserError as error:
        is_forward_only = _parsed(body).forward_only
        return ForwardBackward(datums=(), loss="", config={}, is_forward_only=is_forward_only, complaint=str(error))


def read_forward_backward(body: bytes) -> ForwardBackward:
    """The request. Raises UserError for what is malformed or not served."""
    message = _parsed(body)
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for key, value in message.loss_fn_config_v2.items():
        config[key] = value.text if value.WhichOneof("value") == "text" else value.number
    if not message.data:
        raise UserError("forward_backward: no datum; accepted: at least one")
    return ForwardBackward(
        datums=[_read_datum(place, datum) for place, datum in enumerate(message.data)],
        loss=message.loss_fn,
        config=config,
        is_forward_only=message.forward_only,
    )


def write_forward_backward(done: ForwardBackwardDone) -> bytes:
    """A ForwardBackwardOutput: log-probs of all datums as one record, and the metrics."""
    arrays = [np.ascontiguousarray(each, dtype="<f4") for each in done.logprobs]
    offsets = np.zeros(len(arrays) + 1, dtype="<i8")
    np.cumsum([array.nbytes for array in arrays], out=offsets[1:])
    message = wire.ForwardBackwardOutput(loss_fn_output_type=_OUTPUT_TYPE)
    record = message.loss_fn_outputs.add()
    record.num_datums = len(arrays)
    field = record.fields["logprobs"]
    field.data = b"".join(array.tobytes() for array in arrays)
    field.offsets = offsets.tobytes()
    field.dtype = wire.DTYPE_FLOAT32
    message.metrics["loss:sum"] = done.loss
    return message.SerializeToString(deterministic=True)


def write_sample(done: SampleDone, num_prompt_tokens: int | None = None) -> bytes:
    """A SampleResponse. `num_prompt_tokens`: of a prompt with requested log-probs; None without."""
    message = wire.SampleResponse()
    for sequence in done.sequences:
        message.sequences.add(
            stop_reason=_STOP_REASONS[sequence.stop_reason],
            tokens=np.array(sequence.tokens, dtype="<i4").tobytes(),
            logprobs=np.array(sequence.logprobs, dtype="<f4").tobytes(),
        )
    if num_prompt_tokens is not None:
        scored = np.full(num_prompt_tokens, np.nan, dtype="<f4")
        if done.prompt_logprobs:
            scored[-len(done.prompt_logprobs) :] = done.prompt_logprobs
        message.prompt_logprobs = scored.tobytes()
    return message.SerializeToString(deterministic=True)


def _parsed(body: bytes) -> wire.ForwardBackwardRequest:
    message = wire.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise UserError(f"forward_backward: not a protobuf request ({error}); accepted: tinker 0.25 or newer") from None
    return message


def _read_datum(place: int, message: wire.Datum) -> Datum:
    parts = [_read_chunk(place, chunk) for chunk in message.model_input]
    tokens = np.concatenate(parts) if parts else np.zeros(0, dtype="<i8")
    inputs = {name: _read_tensor(place, name, tensor) for name, tensor in sorted(message.loss_fn_inputs.items())}
    return Datum(tokens=tokens, inputs=inputs)


def _read_chunk(place: int, chunk: wire.Chunk) -> Any:
    kind = chunk.WhichOneof("chunk")
    if kind != "encoded_text":
        raise UserError(f"datum {place}: a chunk of {kind or 'no kind'} is not served; accepted: encoded_text")
    return _array(chunk.encoded_text.tokens, "<i4", f"datum {place}: encoded_text").astype("<i8")


def _read_tensor(place: int, name: str, tensor: wire.Tensor) -> Any:
    where = f"datum {place}: loss_fn_inputs[{name!r}]"
    if tensor.WhichOneof("encoding") != "dense":
        raise UserError(f"{where} is sparse, which is not served; accepted: a dense tensor")
    if tensor.dtype not in _DTYPES:
        raise UserError(f"{where} has dtype {wire.Dtype.Name(tensor.dtype)}; accepted: float32, int64, int32")
    values = _array(tensor.dense, _DTYPES[tensor.dtype], where)
    shape: Sequence[int] = list(tensor.shape) or [values.size]
    if len(shape) != 1 or shape[0] != values.size:
        raise UserError(f"{where} has shape {list(shape)} for {values.size} values; accepted: one axis")
    return values.astype("<i8" if name == TARGETS else "<f4")


def _array(data: bytes, dtype: str, where: str) -> Any:
    try:
        return np.frombuffer(data, dtype=dtype)
    except ValueError:
        raise UserError(f"{where}: {len(data)} bytes are no whole number of values") from None
