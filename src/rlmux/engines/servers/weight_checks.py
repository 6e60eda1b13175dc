"""Verifies a server's weights: compares its checksums with the file's tensors.

A server fuses, pads and packs matrices as its kernels like, and keeps norms as they are, in what it samples in. So what
is compared is every parameter with one axis under the file's name; without such parameters, checksums are useless.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from rlmux.core.errors import PipelineError


def comparable(checksums: Mapping[str, str], tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of parameters that can be compared, sorted."""
    return sorted(name for name, tensor in tensors.items() if tensor.dim() == 1 and name in checksums)


def check_checksums(engine: str, checksums: Mapping[str, str], tensors: Mapping[str, Tensor], dtype: str) -> None:
    """Raises PipelineError for the first parameter whose bytes are not the file's, as they are in `dtype`."""
    for name in comparable(checksums, tensors):
        held = tensors[name].detach().cpu().to(getattr(torch, dtype)).contiguous()
        written = hashlib.sha256(bytes(held.view(torch.uint8).numpy().data)).hexdigest()
        if checksums[name] != written:
            raise PipelineError(
                f"{engine} holds other weights than it was given: {name} has sha256 {checksums[name]}, "
                f"the file {written}"
            )
