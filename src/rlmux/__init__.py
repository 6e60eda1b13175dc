"""Run many LLM RL post-training pipelines together on the GPUs you have.

    import rlmux

    planned = rlmux.plan("examples/07_cluster_what_if.yaml", policy="rollmux")     where each goes, for what price
    table = rlmux.simulate("weave", policies=["solo", "rlmux"])                    figures by policy
    run = rlmux.run("examples/01_two_pipelines.yaml", out="runs/demo")             real training, here
    run = rlmux.open_run("runs/demo")                                              while it goes on, and after
    run.steps.to_pandas()
    rlmux.verify("runs/demo")                                                      is it what training alone gives?

A file is a path, or a mapping of the same keys made in code. What is wrong with it raises UserError, in one line.
Nothing heavy is imported before it is used: `plan` and `simulate` work where torch is not installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlmux.api.commands import compare, load, plan, run, simulate, verify
    from rlmux.api.connection import Connection, connect
    from rlmux.api.run_handle import Run, Table, open_run
    from rlmux.core.errors import PipelineError, PolicyError, RlmuxError, SpecError, UserError

_MODULE_BY_NAME = {
    "compare": "rlmux.api.commands",
    "load": "rlmux.api.commands",
    "plan": "rlmux.api.commands",
    "run": "rlmux.api.commands",
    "simulate": "rlmux.api.commands",
    "verify": "rlmux.api.commands",
    "Connection": "rlmux.api.connection",
    "connect": "rlmux.api.connection",
    "Run": "rlmux.api.run_handle",
    "Table": "rlmux.api.run_handle",
    "open_run": "rlmux.api.run_handle",
    "PipelineError": "rlmux.core.errors",
    "PolicyError": "rlmux.core.errors",
    "RlmuxError": "rlmux.core.errors",
    "SpecError": "rlmux.core.errors",
    "UserError": "rlmux.core.errors",
}
"""Module of each public name: it is imported with the first use."""

__all__ = [
    "Connection",
    "PipelineError",
    "PolicyError",
    "RlmuxError",
    "Run",
    "SpecError",
    "Table",
    "UserError",
    "compare",
    "connect",
    "load",
    "open_run",
    "plan",
    "run",
    "simulate",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("rlmux")
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module 'rlmux' has no attribute {name!r}; it has: {', '.join(__all__)}")
    from importlib import import_module

    value = getattr(import_module(_MODULE_BY_NAME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
