"""The ledger of a broker: which programs lie on which pool, which one holds it, and who has to leave for whom.

    grant      nothing else holds the pools, and all that lies there fits beside the need     a fence is given
    end        the permit is over; its program stays where it is: there may be room for all
    leaving    it was told to leave, its bytes count until it has left
    left       its bytes count no longer
    stuck      it could not leave: the pool is granted to no other, until it leaves or is gone

    a program on a pool:    absent ── grant ─▶ HOLDS ── end ─▶ STAYS ── told to leave ─▶ LEAVING ── left ─▶ absent
                                                  ▲              │                          │
                                                  └──── grant ───┴──────── STUCK ◀── failed ┘

Invariants, checked by `check`: what lies on a pool is at most what the pool has; a pool has one holder; fences rise.
A program is told to leave only for one that can be granted once it has left, and only if there is no room for both.

What this module does not do: it sends nothing, knows no clock, and does not choose whom to grant: the scheduler does.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from rlmux.core.errors import IllegalTransitionError


class Place(StrEnum):
    """How a program lies on a pool."""

    HOLDS = "holds"
    STAYS = "stays"
    LEAVING = "leaving"
    STUCK = "stuck"


@dataclass(slots=True)
class Lodger:
    """One program on one pool."""

    num_bytes: float
    """Bytes that count for it: its need while it holds the pool, afterwards what it says still lies there."""
    place: Place
    reason: str = ""
    """Why it is stuck; empty otherwise."""


@dataclass(frozen=True, slots=True)
class Permit:
    """What was granted and is not over."""

    fence: int
    """Number of the permit, higher than that of any before it."""
    job: str
    pools: tuple[str, ...]


@dataclass(slots=True)
class Residency:
    """The ledger; see the module."""

    capacity_by_pool: Mapping[str, float]
    """Bytes of each pool; infinite where the file says nothing: then permits order computing, and no program leaves."""
    next_fence: int = 1
    lodgers: dict[str, dict[str, Lodger]] = field(default_factory=dict)
    """Programs on each pool, least recently granted first."""
    permits: dict[int, Permit] = field(default_factory=dict)
    """Permits that are not over, by their fences."""

    def __post_init__(self) -> None:
        self.lodgers = {pool: {} for pool in self.capacity_by_pool}

    def holder(self, pool: str) -> str | None:
        """The program that holds the pool."""
        return next((job for job, one in self.lodgers[pool].items() if one.place is Place.HOLDS), None)

    def size(self, pool: str, num_bytes: float | None) -> float:
        """What a need counts: one of unknown size fills the pool."""
        capacity = self.capacity_by_pool[pool]
        if num_bytes is not None:
            return float(num_bytes)
        return 0.0 if math.isinf(capacity) else capacity

    def leavers(self, job: str, need_by_pool: Mapping[str, float | None]) -> dict[str, list[str]] | None:
        """Programs that have to leave each pool before the job can be granted all of them; none of them: it fits.

        None where their leaving would not be enough now: another holds a pool, or one that is stuck is in the way.
        """
        leaving: dict[str, list[str]] = {}
        for pool, need in need_by_pool.items():
            if self.holder(pool) not in (None, job):
                return None
            chosen = self._leavers_of(pool, job, self.size(pool, need))
            if chosen is None:
                return None
            leaving[pool] = chosen
        return leaving

    def tell_to_leave(self, job: str, pool: str) -> None:
        """It was asked to leave; one that is stuck may try again. Raises IllegalTransitionError for any other."""
        lodger = self._lodger(job, pool, Place.STAYS, Place.STUCK)
        lodger.place, lodger.reason = Place.LEAVING, ""

    def left(self, job: str, pool: str) -> None:
        """Its bytes are free."""
        self._lodger(job, pool, Place.STAYS, Place.LEAVING, Place.STUCK)
        del self.lodgers[pool][job]

    def fail_to_leave(self, job: str, pool: str, reason: str) -> None:
        """It is there still, and no other program gets the pool."""
        lodger = self._lodger(job, pool, Place.STAYS, Place.LEAVING, Place.STUCK)
        lodger.place, lodger.reason = Place.STUCK, reason

    def grant(self, job: str, need_by_pool: Mapping[str, float | None]) -> Permit:
        """A permit for all of these pools. Raises IllegalTransitionError where `leavers` names any."""
        leaving = self.leavers(job, need_by_pool)
        if leaving is None or any(leaving.values()):
            raise IllegalTransitionError(f"a permit of {sorted(need_by_pool)} for {job}, before {leaving} have left")
        for pool in need_by_pool:
            if job in self.lodgers[pool] and self.lodgers[pool][job].place is Place.LEAVING:
                raise IllegalTransitionError(f"a permit of {pool} for {job}, which is about to leave it")
        for pool, need in need_by_pool.items():
            self._put(job, pool, self.size(pool, need))
        return self._permit(job, tuple(need_by_pool), self.next_fence)

    def adopt(self, job: str, pools: Collection[str], fence: int) -> Permit:
        """A permit that a broker before this one granted, and that its program still holds."""
        for pool in pools:
            self._put(job, pool, self.size(pool, None))
        return self._permit(job, tuple(pools), fence)

    def lodge(self, job: str, pool: str) -> None:
        """It says that it lies on the pool, of which this ledger knows nothing yet."""
        self.lodgers[pool].setdefault(job, Lodger(self.size(pool, None), Place.STAYS))

    def end(self, fence: int, resident_bytes: Mapping[str, float]) -> Permit:
        """The permit is over, and its program stays on its pools with these bytes, or as many as it needed."""
        permit = self.permits.pop(fence)
        for pool in permit.pools:
            lodger = self.lodgers[pool][permit.job]
            lodger.place = Place.STAYS
            lodger.num_bytes = float(resident_bytes.get(pool, lodger.num_bytes))
        return permit

    def remove(self, job: str) -> None:
        """The program is gone, and all that it had with it."""
        for lodgers in self.lodgers.values():
            lodgers.pop(job, None)
        for fence in [fence for fence, permit in self.permits.items() if permit.job == job]:
            del self.permits[fence]

    def check(self) -> None:
        """Raises IllegalTransitionError where an invariant does not hold."""
        for pool, lodgers in self.lodgers.items():
            used = sum(one.num_bytes for one in lodgers.values())
            if used > self.capacity_by_pool[pool] + 0.5:
                raise IllegalTransitionError(f"{used:.0f} bytes on {pool}, which has {self.capacity_by_pool[pool]:.0f}")
            holders = [job for job, one in lodgers.items() if one.place is Place.HOLDS]
            permitted = [permit.job for permit in self.permits.values() if pool in permit.pools]
            if len(holders) > 1 or sorted(holders) != sorted(permitted):
                raise IllegalTransitionError(f"{pool} is held by {holders}, with permits of {permitted}")
        if any(fence >= self.next_fence for fence in self.permits):
            raise IllegalTransitionError(f"fences {list(self.permits)}, where the next is {self.next_fence}")

    def _leavers_of(self, pool: str, job: str, need: float) -> list[str] | None:
        """The least recently granted ones of whom none could stay; those that leave already come first."""
        others = {name: one for name, one in self.lodgers[pool].items() if name != job}
        free = self.capacity_by_pool[pool] - sum(one.num_bytes for one in others.values()) - need
        chosen: list[str] = []
        for place in (Place.LEAVING, Place.STAYS):
            for name, one in others.items():
                if free >= 0.0:
                    break
                if one.place is place:
                    chosen.append(name)
                    free += one.num_bytes
        if free < 0.0:
            return None
        for name in list(chosen):  # one that came first may not be needed once a larger one leaves
            if free - others[name].num_bytes >= 0.0 and others[name].place is Place.STAYS:
                chosen.remove(name)
                free -= others[name].num_bytes
        return chosen

    def _lodger(self, job: str, pool: str, *places: Place) -> Lodger:
        lodger = self.lodgers[pool].get(job)
        if lodger is None or lodger.place not in places:
            is_ = "not there" if lodger is None else lodger.place
            raise IllegalTransitionError(f"{job} on {pool} is {is_}; accepted: {', '.join(places)}")
        return lodger

    def _put(self, job: str, pool: str, num_bytes: float) -> None:
        self.lodgers[pool].pop(job, None)  # most recently granted last
        self.lodgers[pool][job] = Lodger(num_bytes, Place.HOLDS)

    def _permit(self, job: str, pools: tuple[str, ...], fence: int) -> Permit:
        permit = self.permits[fence] = Permit(fence, job, pools)
        self.next_fence = max(self.next_fence, fence + 1)
        return permit
