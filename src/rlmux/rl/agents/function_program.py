"""A user's Python function as a program: `function_program.py module:function`, started by `programs`.

    function(task) ──▶ a number, its reward; None where it reports one itself

`task` is what the file in RLMUX_TASK_FILE holds: the row, the addresses, the key, the model's name, a seed. An
`async def` is awaited. Run by its path: it imports the standard library and the user's module alone.
"""

import asyncio
import importlib
import inspect
import json
import os
import sys
from collections.abc import Awaitable
from pathlib import Path


def main() -> None:
    module_name, _, name = sys.argv[1].partition(":")
    function = getattr(importlib.import_module(module_name), name)
    result = function(json.loads(Path(os.environ["RLMUX_TASK_FILE"]).read_text()))
    if inspect.isawaitable(result):
        result = asyncio.run(_awaited(result))
    if result is not None:
        Path(os.environ["RLMUX_REWARD_FILE"]).write_text(str(result))  # the repr of a number of numpy names its type


async def _awaited(result: Awaitable[object]) -> object:
    return await result


if __name__ == "__main__":
    sys.path[0] = os.getcwd()  # not the folder of this file, whose modules have names of their own
    main()
