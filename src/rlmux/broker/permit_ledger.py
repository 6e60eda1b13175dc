"""The ledger of a broker: the programs resident on each pool, and its holder.

    grant      nothing else holds the pools                                       a fence is given
    end        the permit is over; its program stays where it is: there may be room for all
    leaving    an eviction was sent
    stuck      it could not leave: orders wait until it leaves or is gone

    a program on a pool:    absent ── grant ─▶ HOLDS ── end ─▶ STAYS ──── evicted ────▶ LEAVING ── left ─▶ absent
                                                  ▲              │                          │
                                                  └──── grant ───┴──────── STUCK ◀── failed ┘

Invariants, checked by `check`: a pool has one holder; fences rise.

This module sends nothing, has no clock, and chooses neither grants nor evictions: the scheduler does.

A module of its own: its transitions and invariants are tested without programs and messages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import InitVar, dataclass, field
from enum import StrEnum

from rlmux.core.errors import IllegalTransitionError


class PoolState(StrEnum):
    """State of a program on a pool."""

    HOLDS = "holds"
    STAYS = "stays"
    LEAVING = "leaving"
    STUCK = "stuck"


@dataclass(slots=True)
class Lodger:
    """One program on one pool."""

    num_bytes: float
    """Bytes needed while it holds the pool, then the reported resident bytes; 0 without a report."""
    state: PoolState
    reason: str = ""
    """Why it is stuck; empty otherwise."""


@dataclass(frozen=True, slots=True)
class Permit:
    """An open permit."""

    fence: int
    """Number of the permit, higher than every earlier one."""
    job: str
    pools: tuple[str, ...]


@dataclass(slots=True)
class Residency:
    """The ledger; see the module."""

    pools: InitVar[Iterable[str]]
    next_fence: int = 1
    lodgers: dict[str, dict[str, Lodger]] = field(default_factory=dict)
    """Programs on each pool, least recently granted first."""
    permits: dict[int, Permit] = field(default_factory=dict)
    """Open permits by fence."""

    def __post_init__(self, pools: Iterable[str]) -> None:
        self.lodgers = {pool: {} for pool in pools}

    def holder(self, pool: str) -> str | None:
        """The program that holds the pool."""
        return next((job for job, lodger in self.lodgers[pool].items() if lodger.state is PoolState.HOLDS), None)

    def is_free(self, job: str, pools: Iterable[str]) -> bool:
        """Whether no other program holds one of the pools."""
        return all(self.holder(pool) in (None, job) for pool in pools)

    def request_leave(self, job: str, pool: str) -> None:
        """Record an eviction, also of a stuck program. Raises IllegalTransitionError in any other state."""
        lodger = self._lodger(job, pool, PoolState.STAYS, PoolState.STUCK)
        lodger.state, lodger.reason = PoolState.LEAVING, ""

    def left(self, job: str, pool: str) -> None:
        """Record that the program has left the pool."""
        self._lodger(job, pool, PoolState.STAYS, PoolState.LEAVING, PoolState.STUCK)
        del self.lodgers[pool][job]

    def fail_to_leave(self, job: str, pool: str, reason: str) -> None:
        """Record a failed eviction: no other program gets the pool."""
        lodger = self._lodger(job, pool, PoolState.STAYS, PoolState.LEAVING, PoolState.STUCK)
        lodger.state, lodger.reason = PoolState.STUCK, reason

    def grant(self, job: str, need_by_pool: Mapping[str, float | None]) -> Permit:
        """Grant a permit for all of these pools. Raises IllegalTransitionError if one is held or being left."""
        if not self.is_free(job, need_by_pool):
            pools = ", ".join(sorted(need_by_pool))
            raise IllegalTransitionError(f"a permit of {pools} for {job}, while another holds one")
        for pool in need_by_pool:
            if job in self.lodgers[pool] and self.lodgers[pool][job].state is PoolState.LEAVING:
                raise IllegalTransitionError(f"a permit of {pool} for {job}, which is about to leave it")
        for pool, need in need_by_pool.items():
            self._put(job, pool, need or 0.0)
        return self._permit(job, tuple(need_by_pool), self.next_fence)

    def adopt(self, job: str, pools: Collection[str], fence: int) -> Permit:
        """Adopt a permit of an earlier broker that its program still holds."""
        for pool in pools:
            self._put(job, pool, 0.0)
        return self._permit(job, tuple(pools), fence)

    def lodge(self, job: str, pool: str) -> None:
        """Record a program that reports an unrecorded residency on the pool."""
        self.lodgers[pool].setdefault(job, Lodger(0.0, PoolState.STAYS))

    def end(self, fence: int, resident_bytes: Mapping[str, float]) -> Permit:
        """End a permit. Its program stays on the pools with these bytes, by default those it needed."""
        permit = self.permits.pop(fence)
        for pool in permit.pools:
            lodger = self.lodgers[pool][permit.job]
            lodger.state = PoolState.STAYS
            lodger.num_bytes = float(resident_bytes.get(pool, lodger.num_bytes))
        return permit

    def remove(self, job: str) -> None:
        """Remove a program with its permits and residencies."""
        for lodgers in self.lodgers.values():
            lodgers.pop(job, None)
        for fence in [fence for fence, permit in self.permits.items() if permit.job == job]:
            del self.permits[fence]

    def check(self) -> None:
        """Raises IllegalTransitionError for a violated invariant."""
        for pool, lodgers in self.lodgers.items():
            holders = [job for job, lodger in lodgers.items() if lodger.state is PoolState.HOLDS]
            permitted = [permit.job for permit in self.permits.values() if pool in permit.pools]
            if len(holders) > 1 or sorted(holders) != sorted(permitted):
                raise IllegalTransitionError(f"{pool} is held by {holders}, with permits of {permitted}")
        if any(fence >= self.next_fence for fence in self.permits):
            raise IllegalTransitionError(f"fences {list(self.permits)}, where the next is {self.next_fence}")

    def _lodger(self, job: str, pool: str, *places: PoolState) -> Lodger:
        lodger = self.lodgers[pool].get(job)
        if lodger is None or lodger.state not in places:
            is_ = "not there" if lodger is None else lodger.state
            raise IllegalTransitionError(f"{job} on {pool} is {is_}; accepted: {', '.join(places)}")
        return lodger

    def _put(self, job: str, pool: str, num_bytes: float) -> None:
        self.lodgers[pool].pop(job, None)  # most recently granted last
        self.lodgers[pool][job] = Lodger(num_bytes, PoolState.HOLDS)

    def _permit(self, job: str, pools: tuple[str, ...], fence: int) -> Permit:
        permit = self.permits[fence] = Permit(fence, job, pools)
        self.next_fence = max(self.next_fence, fence + 1)
        return permit
