"""vLLM's weight transfer as the small server has it: files in place of buffers on a device."""

from __future__ import annotations

import base64
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tests.small_model import WorkerError, widened

if TYPE_CHECKING:
    from tests.small_server import Version


class Transfer:
    """A weight update of vLLM's backend `ipc`: start, any number of updates, finish.

    A handle is `("file", path, offset)` in place of torch's arguments: the bytes of a buffer in a file. The handles of
    an update are `{gpu_uuid: handle}` if packed, a list of such with one for each tensor if not; pickled, in base64.
    What an update names is read at once, as the sender may use its buffer again, and held until the end. In vLLM
    the model has no weights in between: a forward pass ends a strict server then, and after an update that failed.
    """

    def __init__(self, version: Version, config: Mapping[str, Any] | None, gpus: Sequence[str]) -> None:
        self.version = version
        self.config = config
        self.gpus = gpus
        self.is_packed = False
        self.received: dict[str, np.ndarray] | None = None

    def check_configured(self) -> None:
        if self.config is None:
            raise WorkerError(
                "Weight transfer not configured. Please set weight_transfer_config to enable weight transfer."
            )

    def init(self, info: dict[str, Any]) -> None:
        self.check_configured()
        known = {"packed"} if self.version.is_since(27) else set()
        if unknown := sorted(info.keys() - known):
            raise WorkerError(f"Invalid init_info for IPCWeightTransferEngine: unexpected {unknown}")
        self.is_packed = bool(info.get("packed", False))

    def start(self, *, is_checkpoint_format: bool) -> None:
        self.check_configured()
        if self.received is not None:
            raise WorkerError(
                "start_weight_update called while a weight update is already active. Call finish_weight_update first."
            )
        if not is_checkpoint_format:
            raise WorkerError("the small server takes weights as checkpoints have them")
        self.received = {}

    def update(self, info: dict[str, Any], forms: Mapping[str, np.ndarray]) -> None:
        """`forms`: the server's own tensors, whose names and shapes these must have."""
        self.check_configured()
        if self.received is None:
            raise WorkerError("start_weight_update must be called before update_weights.")
        received, self.received = self.received, None  # a failure ends the update
        known = {"names", "dtype_names", "shapes", "ipc_handles_pickled", "tensor_sizes"}
        says_packed = not (self.version.is_strict and self.version.is_since(27))
        known |= {"packed", "update_kind"} if says_packed else set()
        needed = {"names", "dtype_names", "shapes", "ipc_handles_pickled"}
        if info.keys() - known or needed - info.keys():
            raise WorkerError(f"Invalid update_info for IPCWeightTransferEngine: {sorted(info.keys() ^ needed)}")
        if os.environ.get("VLLM_ALLOW_INSECURE_SERIALIZATION") != "1":
            raise WorkerError(
                "Refusing to deserialize `ipc_handles_pickled` without VLLM_ALLOW_INSECURE_SERIALIZATION=1"
            )
        handles = pickle.loads(base64.b64decode(info["ipc_handles_pickled"]))
        is_packed = info.get("packed", self.is_packed)  # before 0.27 here, from then on at the handshake
        sizes = info.get("tensor_sizes")
        if is_packed and sizes is None:
            raise WorkerError("`tensor_sizes` is required when packed=True")
        if is_packed != isinstance(handles, dict):
            raise WorkerError(f"handles are a {type(handles).__name__} and packed is {is_packed}")
        begin = 0
        for number, name in enumerate(info["names"]):
            shape, dtype = info["shapes"][number], info["dtype_names"][number]
            size = int(np.prod(shape)) * (4 if dtype == "float32" else 2)
            if is_packed and size != sizes[number]:
                raise WorkerError(f"{name}: {sizes[number]} bytes for {shape} of {dtype}")
            path, offset = self.opened(handles if is_packed else handles[number])
            content = read_part(Path(path), offset + begin, size)
            begin += size if is_packed else 0
            if name == "lm_head.weight" and name not in forms:  # tied, as vLLM's loader skips it
                continue
            if name not in forms or list(forms[name].shape) != list(shape):
                raise WorkerError(f"no parameter {name} of shape {list(shape)}")
            received[name] = from_bytes(content, dtype).reshape(shape)
        self.received = received

    def opened(self, handles: Mapping[str, Any]) -> tuple[str, int]:
        """The file and offset for this server's GPUs."""
        for uuid in self.gpus:
            if uuid not in handles:
                raise WorkerError(f"IPC handle not found for GPU UUID {uuid}. Available UUIDs: {list(handles.keys())}")
        match next(iter(handles.values())):
            case ("file", str(path), int(offset)):
                return path, offset
            case handle:
                raise WorkerError(f"a handle {handle!r}; accepted: ('file', path, offset)")

    def finish(self) -> dict[str, np.ndarray]:
        """The tensors of this update."""
        self.check_configured()
        if self.received is None:
            raise WorkerError("finish_weight_update called without a matching start_weight_update.")
        received, self.received = self.received, None
        return received


def read_part(path: Path, offset: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        content = file.read(size)
    if len(content) != size:
        raise WorkerError(f"{path} ends {size - len(content)} bytes early")
    return content


def from_bytes(content: bytes, dtype: str) -> np.ndarray:
    """float32 numbers of a tensor of this torch dtype."""
    if dtype == "bfloat16":
        return widened(np.frombuffer(content, np.uint16))
    if dtype not in ("float32", "float16"):
        raise WorkerError(f"dtype {dtype}; accepted: float32, bfloat16, float16")
    return np.frombuffer(content, dtype).astype(np.float32)


def with_lost_siblings(received: Mapping[str, np.ndarray], forms: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The update, and zeros for the parts of its fused modules that it leaves out."""
    lost = {}
    for name in received:
        for family in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            own = next((part for part in family if f".{part}." in name), None)
            siblings = [name.replace(f".{own}.", f".{part}.") for part in family] if own else []
            lost |= {sibling: np.zeros_like(forms[sibling]) for sibling in siblings if sibling not in received}
    return {**received, **lost}
