"""What models and GPUs are: shapes and peak figures from the package's small tables.

    data/models.csv ──> model_shape("Qwen/Qwen3-4B") ──> ModelShape
    data/gpus.csv   ──> gpu_spec("H100")             ──> GpuSpec

Nothing here is a duration; `curves.py` has the formulas, `costs.py` the choice between measured and
estimated.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache

from rlmux.core.errors import UserError
from rlmux.sim import data_tables


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """A decoder's size: dense, or a mixture of experts in every layer."""

    name: str
    params: float
    """Parameters, embeddings included."""
    layers: int
    hidden: int
    kv_heads: int
    head_dim: int
    bytes_per_weight: float = 2.0
    active_params: float | None = None
    """Parameters that compute a token; None: all of them, a dense model."""
    num_experts: int = 1
    """Experts of each layer; 1 for a dense model."""
    num_picked: int = 1
    """Experts that compute a token."""

    def __post_init__(self) -> None:
        for field in ("params", "layers", "hidden", "kv_heads", "head_dim", "bytes_per_weight"):
            if not getattr(self, field) > 0:
                raise UserError(f"model {self.name!r}: {field} must be more than 0, not {getattr(self, field)}")
        if not 1 <= self.num_picked <= self.num_experts:
            raise UserError(
                f"model {self.name!r}: num_picked must be from 1 to num_experts {self.num_experts}, "
                f"not {self.num_picked}"
            )
        if not 0 <= self.expert_params <= self.params or (self.num_picked == self.num_experts and self.idle_params):
            raise UserError(
                f"model {self.name!r}: {self.num_picked} of {self.num_experts} experts cannot leave "
                f"{self.active_params} of {self.params} parameters active"
            )

    @property
    def idle_params(self) -> float:
        """Parameters that a token leaves out."""
        return 0.0 if self.active_params is None else self.params - self.active_params

    @property
    def idle_share(self) -> float:
        """Part of the experts that a token leaves out."""
        return 1 - self.num_picked / self.num_experts

    @property
    def expert_params(self) -> float:
        """Parameters of all experts."""
        return self.idle_params / self.idle_share if self.idle_share else 0.0

    @property
    def computing_params(self) -> float:
        """Parameters that compute a token."""
        return self.params - self.idle_params

    @property
    def weight_bytes(self) -> float:
        return self.params * self.bytes_per_weight

    @property
    def kv_bytes_per_token(self) -> int:
        """Key and value of one token over all layers, two bytes each number, on one GPU."""
        return self.kv_bytes_per_gpu_token(1)

    def kv_bytes_per_gpu_token(self, tp: int) -> int:
        """The same on each GPU of a tensor-parallel group; heads fewer than GPUs are held more than once."""
        return 2 * 2 * self.layers * math.ceil(self.kv_heads / tp) * self.head_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSpec:
    """Peak figures of one GPU."""

    name: str
    tflops_peak: float
    tflops: float
    """TFLOP/s that large bf16 matrix products reach."""
    hbm_gb: float
    hbm_tbps: float
    nvlink_gbps: float
    """GB/s of NVLink, both directions added; of PCIe where there is no NVLink."""
    num_sms: int
    pcie_gbps: float
    """GB/s between the GPU and host memory, one direction."""


def model_shape(name: str) -> ModelSize:
    """The shape of a known model, by any usual spelling: `Qwen/Qwen3-4B-Instruct-2507` is `qwen3-4b`."""
    key = _plain_model_name(name)
    shapes = model_shapes()
    if key not in shapes:
        raise UserError(
            f"model {name!r} has no row in the table of shapes; known: {', '.join(shapes)}; "
            "for another one pass a ModelShape"
        )
    return shapes[key]


@cache
def model_shapes() -> dict[str, ModelSize]:
    return {
        row["model"]: ModelSize(
            name=row["model"],
            params=float(row["params_b"]) * 1e9,
            layers=int(row["layers"]),
            hidden=int(row["hidden"]),
            kv_heads=int(row["kv_heads"]),
            head_dim=int(row["head_dim"]),
            active_params=float(row["active_b"]) * 1e9 if row["active_b"] else None,
            num_experts=int(row["experts"] or 1),
            num_picked=int(row["picked"] or 1),
        )
        for row in data_tables.rows("models")
    }


def gpu_spec(name: str) -> GpuSpec:
    """A known GPU, by its full name, a part of it (`H100`, `A100-40GB`), or its driver's (`NVIDIA A100-SXM4-40GB`)."""
    specs = gpu_specs()
    wanted = [word for word in re.split(r"[^A-Z0-9]+", name.upper()) if word not in _OF_DRIVERS]
    for spec in specs.values():
        if wanted and set(wanted) <= set(spec.name.upper().split("-")):
            return spec
    raise UserError(f"GPU {name!r} has no row in the table of GPUs; known: {', '.join(specs)}")


@cache
def gpu_specs() -> dict[str, GpuSpec]:
    return {
        row["gpu"]: GpuSpec(
            name=row["gpu"],
            tflops_peak=float(row["tflops_peak"]),
            tflops=float(row["tflops"]),
            hbm_gb=float(row["hbm_gb"]),
            hbm_tbps=float(row["hbm_tbps"]),
            nvlink_gbps=float(row["nvlink_gbps"]),
            num_sms=int(row["num_sms"]),
            pcie_gbps=float(row["pcie_gbps"]),
        )
        for row in data_tables.rows("gpus")
    }


def _plain_model_name(name: str) -> str:
    key = name.rsplit("/", 1)[-1].lower().replace("_", "-")
    key = re.sub(r"-(instruct|base|thinking|it|chat|2507|bf16|fp8)\b", "", key)
    return _MODEL_ALIASES.get(key, key)


_OF_DRIVERS = ("", "NVIDIA", "SXM", "SXM2", "SXM4", "SXM5", "HBM2E", "HBM3", "HBM3E", "PCIE")
"""Words of a driver's name of a GPU that do not tell it from others."""
_MODEL_ALIASES = {
    "llama-3-1-8b": "llama-3.1-8b",
    "llama3-1-8b": "llama-3.1-8b",
    "llama-8b": "llama-3.1-8b",
    "meta-llama-3.1-8b": "llama-3.1-8b",
    "qwen3-0-6b": "qwen3-0.6b",
    "mixtral-8x7b-v0.1": "mixtral-8x7b",
    "deepseek-r1-distill-qwen-14b": "qwen2.5-14b",
}
