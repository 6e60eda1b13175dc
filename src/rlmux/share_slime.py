"""slime in phases of a job: `share.slime(job)` is a callback for it. Free to copy, beside `share.py`."""

from __future__ import annotations

from typing import Any

_SLIME_ROLES: Any = {"sampler": ("rollout", ()), "trainer": ("train", ()), "both": ("train", ("rollout",))}
"""(role of the pool that a phase of slime needs, roles of those beside it), by slime's name of the role."""


class SlimePhases:
    """A callback of slime's phases (`--phase-callback-path`, which forks of slime have): a permit for each.

    The sampler's phases take the pool of role "rollout", the trainer's that of "train", and "both" takes the two. What
    lies on them leaves by slime's own offload calls in its phases, or by hooks given with `job.on_leave`.
    """

    def __init__(self, job: Any) -> None:
        self._job = job
        self._open: list[Any] = []
        """(phase, role, permit's region) of the phases that have begun, outermost first."""

    def on_phase_begin(self, phase: str, role: str) -> None:
        """Returns once the role's pools are granted. Raises ValueError for a role that there is not."""
        if role not in _SLIME_ROLES:
            raise ValueError(f"role {role!r} of phase {phase!r}; accepted: {', '.join(_SLIME_ROLES)}")
        name, also = _SLIME_ROLES[role]
        region = self._job.phase(name, also=also)
        region.__enter__()
        self._open.append((phase, role, region))

    def on_phase_end(self, phase: str, role: str) -> None:
        """Gives the pools back. Raises ValueError for a phase that is not the one that began last."""
        if not self._open or self._open[-1][:2] != (phase, role):
            last = self._open[-1][:2] if self._open else None
            raise ValueError(f"phase {(phase, role)} ends, and {last} began last; accepted: the one that began last")
        self._open.pop()[2].__exit__(None, None, None)


def slime(job: Any) -> SlimePhases:
    """The callback of slime's phases for this job."""
    return SlimePhases(job)
