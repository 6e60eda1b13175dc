"""What the fork server imports once, so that no worker has to: torch on one thread, and the engines."""

import torch

import rlmux.engines.rollout
import rlmux.engines.train
import rlmux.rl.host  # noqa: F401

# A fork after torch has started its threads hangs at the next parallel operation; one thread starts none.
torch.set_num_threads(1)
