"""Which device samples which prompts of a step.

    expected lengths known   the most tokens first, each prompt to the device with the fewest so far
    not known                one after another

A prompt's trajectories stay together: their prompt is computed once, and their lengths predict each other. The device
does not change a trajectory.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from statistics import fmean

from rlmux.core.model import DeviceId
from rlmux.rl.types import TrajectoryRequest


def assign_prompts(
    requests: Sequence[TrajectoryRequest], devices: Sequence[DeviceId]
) -> dict[DeviceId, list[TrajectoryRequest]]:
    """The requests of each device, in the order given. `requests`: in id order."""
    groups = {prompt: list(group) for prompt, group in groupby(requests, key=lambda request: request.id[:2])}
    tokens = {prompt: sum(request.expected_tokens for request in group) for prompt, group in groups.items()}
    known = [count / len(groups[prompt]) for prompt, count in tokens.items() if count]
    if not known:
        place_of = {prompt: number % len(devices) for number, prompt in enumerate(groups)}
    else:
        usual = fmean(known)
        load = {prompt: count or usual * len(groups[prompt]) for prompt, count in tokens.items()}
        place_of, loads = {}, [0.0] * len(devices)
        for prompt in sorted(groups, key=lambda prompt: -load[prompt]):
            place_of[prompt] = loads.index(min(loads))
            loads[place_of[prompt]] += load[prompt]
    dealt: dict[DeviceId, list[TrajectoryRequest]] = {device: [] for device in devices}
    for prompt, group in groups.items():
        dealt[devices[place_of[prompt]]] += group
    return dealt
