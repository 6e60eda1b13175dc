"""Processes that multiprocessing starts without the user's script, and without modules of the working folder.

A script needs no `if __name__ == "__main__":` around what it asks of rlmux: what is started under `hidden_main` gains
nothing from it but its imports, and would begin the same work again. Functions and values that are handed to such a
process come from modules. A `types.py` of the user's, in the folder that a command is called from, is not Python's.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from types import ModuleType

_SAFE_PATH = "PYTHONSAFEPATH"
_OURS = "rlmux"
"""Our value of the variable, any of which keeps the working folder off a new process's search path."""


@contextlib.contextmanager
def hidden_main() -> Iterator[None]:
    """Hide the script and the working folder from processes, and fork servers, that are started meanwhile."""
    script = sys.modules["__main__"]
    is_ours = _SAFE_PATH not in os.environ
    sys.modules["__main__"] = ModuleType("__main__")
    if is_ours:
        os.environ[_SAFE_PATH] = _OURS
    try:
        yield
    finally:
        sys.modules["__main__"] = script
        if is_ours:
            os.environ.pop(_SAFE_PATH, None)


def show_working_folder() -> None:
    """Undo the hiding for processes that this one starts: programs of the user's code."""
    if os.environ.get(_SAFE_PATH) == _OURS:
        del os.environ[_SAFE_PATH]
