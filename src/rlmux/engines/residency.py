"""Between device and host: what both engines need to leave a device and come back.

    offload:  host_copy of each tensor ─▶ its device storage to size 0 ─▶ give_back

On a CPU both sides are the same memory, and only the storage counts.
"""

from __future__ import annotations

import torch
from torch import Tensor


def host_copy(tensor: Tensor) -> Tensor:
    """In host memory; pinned where the tensor is on a GPU, so that the way back is a direct transfer."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return copy.copy_(tensor)


def give_back(device: torch.device) -> None:
    """Free storage is kept for this process by default: hand it to the others on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
