"""Where an actor's worker comes from: a fork server of its machine that has imported torch, so that it takes a tenth
of a second instead of the seconds of that import.

    the controller's machine    the controller's own fork server, as under `local`
    another machine             that of a nursery, an actor on each Ray node there
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlmux.runtime.processes import fork_server_address


class Nursery:
    """An actor that keeps its node's fork server. The server ends with it, and the workers with the server."""

    def address(self) -> str:
        """Of one that runs: one that was killed is started again."""
        return fork_server_address()


class Nurseries:
    """A fork server for each Ray node."""

    def __init__(self, ray_ids: Iterable[str], *, here: Iterable[str]) -> None:
        """`here`: those that are this machine."""
        self._here = frozenset(here)
        self._nursery_by_ray_id: dict[str, Any] = {}
        for ray_id in ray_ids:
            self.address_on(ray_id)  # it imports torch while the first pipelines are placed

    def address_on(self, ray_id: str) -> Any:
        """The address, or a reference of it."""
        if ray_id in self._here:
            return fork_server_address()
        if ray_id not in self._nursery_by_ray_id:
            make: Any = ray.remote(Nursery)
            strategy = NodeAffinitySchedulingStrategy(ray_id, soft=False)
            options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
            self._nursery_by_ray_id[ray_id] = make.options(scheduling_strategy=strategy, **options).remote()
        return self._nursery_by_ray_id[ray_id].address.remote()

    def forget(self, ray_id: str) -> None:
        """The node is lost."""
        self._nursery_by_ray_id.pop(ray_id, None)
