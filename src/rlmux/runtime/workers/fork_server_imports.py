"""Imports of the fork server, done once for all workers: torch on one thread, the engines, and the workers themselves.

Imports leave no garbage, and looking for it takes a fifth of their time, so the collector rests meanwhile. What the
imports have made is not looked at again afterwards either: workers go on sharing its memory with the fork server.

No import may initialize CUDA, which a forked process cannot do again. torchao's does (0.18), and transformers and peft
import it where it is installed, for models that it has quantized: here both find it absent. A worker that needs it
(8-bit moments) imports it itself.
"""

import contextlib
import gc
import signal
import sys

signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the controller's to answer
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

gc.disable()
sys.modules.setdefault("torchao", None)  # type: ignore[arg-type]  # how Python says that a module is absent
try:
    import torch

    from rlmux.engines.model.transformers_import import import_transformers

    import_transformers()

    import rlmux.engines.adapters.lora
    import rlmux.engines.determinism_probe
    import rlmux.engines.rollout.slot_engine
    import rlmux.engines.train.train_engine
    import rlmux.rl.user_code.pipeline_env
    import rlmux.runtime.workers.planned_workers
    import rlmux.runtime.workers.tenant_hosts
    from rlmux.core.errors import UserError

    with contextlib.suppress(UserError):  # only pipelines with an adapter need it, and they raise
        rlmux.engines.adapters.lora.load_peft()
finally:
    if sys.modules["torchao"] is None:
        del sys.modules["torchao"]
    gc.enable()
gc.freeze()

# A fork after torch has started its threads hangs at the next parallel operation; one thread starts none.
torch.set_num_threads(1)
