"""Fork servers for actors' workers, one per machine. Each has imported torch, so that a worker starts in a tenth of a
second instead of several.

    the controller's machine    the controller's own fork server, as under `local`
    another machine             the fork server that an actor on its Ray node keeps

A module of its own: it keeps actors of its own, whose life is not that of workers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlmux.runtime.workers.processes import fork_server_address


class ForkServerKeeper:
    """An actor that keeps its node's fork server. The server ends with the actor, and the workers with the server."""

    def address(self) -> str:
        """The address of a server that runs; one that was killed is started again."""
        return fork_server_address()


class ForkServers:
    """A fork server for each Ray node."""

    def __init__(self, ray_ids: Iterable[str], *, here: Iterable[str]) -> None:
        """`here`: the Ray nodes that are this machine."""
        self._here = frozenset(here)
        self._keeper_by_ray_id: dict[str, Any] = {}
        for ray_id in ray_ids:
            self.address_on(ray_id)  # the server imports torch while the first pipelines are placed

    def address_on(self, ray_id: str) -> Any:
        """The address, or a reference to it."""
        if ray_id in self._here:
            return fork_server_address()
        if ray_id not in self._keeper_by_ray_id:
            make: Any = ray.remote(ForkServerKeeper)
            strategy = NodeAffinitySchedulingStrategy(ray_id, soft=False)
            options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
            self._keeper_by_ray_id[ray_id] = make.options(scheduling_strategy=strategy, **options).remote()
        return self._keeper_by_ray_id[ray_id].address.remote()

    def keepers(self) -> list[Any]:
        """The actors that keep the servers of other machines."""
        return list(self._keeper_by_ray_id.values())

    def forget(self, ray_id: str) -> None:
        """Drop the server of a node that is lost."""
        self._keeper_by_ray_id.pop(ray_id, None)
