"""Decisions of the policy that failed: it raised, or it chose what is not allowed.

    a decision fails ── note ─▶ counted ── an error of its method that is new ─▶ ReportPolicyFault

Such a decision is dropped as a whole, and the plain order of work stands in for it:

    place       nodes of its own where enough are free; otherwise the pipeline waits       placement/own_nodes.py
    rebalance   no pipeline relocates
    dispatch    oldest ready work on free devices, continuations first                     steps/plain_order.py

The next decision is the policy's again. What is noted follows from the events alone, so a replay reports the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from rlmux.core.actions import Action, ReportPolicyFault
from rlmux.core.errors import RlmuxError
from rlmux.core.state import SchedulerState

MAX_REPORTED = 100
"""Different errors that are reported; others are counted only."""
_MAX_LENGTH = 400
"""Characters of an error that are reported."""
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{4,}")


class PolicyFaults:
    """Notes failed decisions; see the module."""

    def __init__(self, state: SchedulerState, policy_name: str, *, raises: bool) -> None:
        """`raises`: a failed decision raises its error instead, after which the state is not to be used further."""
        self.raises = raises
        self._counts = True
        self._state = state
        self._policy_name = policy_name

    def note(self, method: str, error: Exception) -> str:
        """Count a failed decision, and report its error where it is new; returns in words what failed."""
        if self.raises:
            raise error
        text = described(error)
        if self._counts:
            self._count(method, text)
        return f"policy {self._policy_name} failed in {method}: {text}"

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Failures in the body are no decisions: people ask what the policy would decide."""
        self._counts = False
        try:
            yield
        finally:
            self._counts = True

    def take(self) -> list[Action]:
        """Emit what is new."""
        new, self._state.dirty.policy_faults = self._state.dirty.policy_faults, []
        return [ReportPolicyFault(policy=self._policy_name, method=method, error=text) for method, text in new]

    def _count(self, method: str, text: str) -> None:
        state = self._state
        state.num_policy_faults += 1
        if (method, text) not in state.policy_faults and len(state.policy_faults) < MAX_REPORTED:
            state.policy_faults[method, text] = None
            state.dirty.policy_faults.append((method, text))


def described(error: Exception) -> str:
    """The error in one line, the same in every process: without addresses of objects, nor the recent events."""
    line = str(error).partition("\n")[0]
    text = line if isinstance(error, RlmuxError) else f"{type(error).__name__}: {line}"
    return _ADDRESS.sub("0x", text)[:_MAX_LENGTH]
