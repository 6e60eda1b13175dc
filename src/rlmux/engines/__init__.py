"""Engines: what samples and what trains. Passive; every call is bounded.

Reading order: residency, device_fraction, durable_files, spare_files, determinism_probe, logprob_gap, user_engine.
"""

import logging

# transformers imports torchao if it is installed; that import warns of kernels for absent devices and of a deprecated
# call of its own.
_OF_NO_USE = {"torchao": "Failed to load", "torch.utils._pytree": "register_constant"}


def _hide(logger_name: str, text: str) -> None:
    logging.getLogger(logger_name).addFilter(lambda record: text not in str(record.msg))


for _name, _text in _OF_NO_USE.items():
    _hide(_name, _text)
