"""What was used, forgotten by half each week: exact at any time, without a clock that ticks.

    used U until t, at rate r from t to t + dt:   U' = U * 2^(-dt/H) + r * H/ln 2 * (1 - 2^(-dt/H))

Sums of parts decay as the parts do, so each device adds what was used on it whenever that changes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

HALF_LIFE_S = 7 * 24 * 3600.0
"""Seconds after which half of what was used is forgotten (H above), unless the file sets it."""
FULL_S = HALF_LIFE_S / math.log(2.0)
"""Usage of one device that was held for ever, at that half-life."""


def full_of(half_life_s: float) -> float:
    """Usage of one device that was held for ever."""
    return half_life_s / math.log(2.0)


@dataclass(slots=True)
class DecayedUsage:
    """Used device-seconds, decayed over time."""

    device_s: float = 0.0
    at_s: float = 0.0
    """Time at which `device_s` was so much."""
    half_life_s: float = HALF_LIFE_S
    """Seconds after which half of it is forgotten."""

    def at(self, now_s: float) -> float:
        """Device-seconds at this time, if nothing was used since `at_s`."""
        return self.device_s * math.exp2((self.at_s - now_s) / self.half_life_s)

    def add(self, device_s: float, now_s: float) -> None:
        """Count what was used at one instant."""
        self.device_s, self.at_s = self.at(now_s) + device_s, now_s

    def add_rate(self, rate: float, since_s: float, now_s: float) -> None:
        """Count what was used at a constant rate, in devices, from `since_s` until now."""
        full_s = full_of(self.half_life_s)
        self.add(-rate * full_s * math.expm1((since_s - now_s) / full_s), now_s)
