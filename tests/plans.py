"""Plans that tests hand to a policy in place of the scheduler's."""

from __future__ import annotations

from collections.abc import Callable

from rlmux.core.decision.plan import Choice, GroupPlan


class Filtered(GroupPlan):
    """Fills another plan with those choices alone that `keep` is true of."""

    def __init__(self, plan: GroupPlan, keep: Callable[[Choice], bool]) -> None:
        super().__init__(plan._state, plan._group, plan._check)
        self._planned, self._choices, self._keep = plan._planned, plan._choices, keep

    def choose(self, *choices: Choice) -> GroupPlan:
        for choice in choices:
            if self._keep(choice):
                super().choose(choice)
        return self
