"""Processes that multiprocessing starts without running the user's script in each of them once more.

A script needs no `if __name__ == "__main__":` around what it asks of rlmux: what is started under `hidden_main` gains
nothing from it but its imports, and would begin the same work again. Functions and values that are handed to such a
process come from modules.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType


@contextlib.contextmanager
def hidden_main() -> Iterator[None]:
    """Hide the script from processes, and fork servers, that are started meanwhile."""
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script
