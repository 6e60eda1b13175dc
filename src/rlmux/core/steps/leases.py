"""Which orders compute on a device, and which states lie there: leases and residency.

    take     an order leases a device fraction; the state it needs is brought there, others are evicted
    release  the order has ended; its state stays until its room is needed

    state of a pipeline for one phase, on one device:
        absent ── COLD ─▶ on the device ── evicted ─▶ off the device ── WARM ─▶ on the device

The tail of a rollout that has left its node to others computes on GPUs of its own: its state is no longer one of the
device's. A device's leases sum to at most 1. A state whose order computes is never evicted; among the others those of
fillers leave first, then the least recently used. A filler's order is beside the leases: it computes while there are
none.
"""

from __future__ import annotations

from rlmux.core.actions import Switch
from rlmux.core.estimation.tail_gain import is_tail
from rlmux.core.journal import Journal
from rlmux.core.model import Cluster, DeviceId, OrderId, Phase, PipelineId, Placement, Resident
from rlmux.core.pipeline_run import PipelineRun, device_keys
from rlmux.core.state import DeviceState, SchedulerState
from rlmux.core.work import Order

FRACTION_TOLERANCE = 1e-9


class Leases:
    """Owns the orders and residents of every device; see the module."""

    def __init__(self, cluster: Cluster, state: SchedulerState, journal: Journal) -> None:
        self._cluster = cluster
        self._state = state
        self._journal = journal

    def add_devices(self, placement: Placement) -> None:
        """Know the devices of these nodes from now on."""
        for node in placement.nodes:
            pool = self._cluster.pools[node.pool]
            for device in pool.devices(node):
                if device not in self._state.devices:
                    self._state.devices[device] = DeviceState(device, memory_bytes=pool.device_memory_bytes)

    def take(
        self,
        run: PipelineRun,
        phase: Phase,
        devices: tuple[DeviceId, ...],
        order: OrderId,
        device_fraction: float,
        rollout_devices: tuple[DeviceId, ...] = (),
    ) -> tuple[Switch, tuple[Resident, ...]]:
        """Lease the devices and make room there for the pipeline's state for the phase, or on some for rollouts.

        Returns the worst switch of all devices and the states that must leave them. Raises IllegalTransitionError
        where the fraction is not free or the state does not fit.
        """
        footprint = run.pipeline.footprint
        switch = Switch.NONE
        evicted: dict[Resident, None] = {}
        for device_id in devices:
            device = self._state.devices[device_id]
            here = Phase.ROLLOUT if device_id in rollout_devices else phase
            key = (run.pipeline.id, here)
            need = footprint.rollout_device_bytes if here is Phase.ROLLOUT else footprint.train_device_bytes
            if device_fraction <= 0.0 or sum(device.orders.values()) + device_fraction > 1.0 + FRACTION_TOLERANCE:
                raise self._journal.illegal(
                    f"order {order} leases {device_fraction} of {device_id}, held by {device.orders}"
                )
            device.orders[order] = device_fraction
            if key in device.residents:
                device.residents[key] = device.residents.pop(key)  # most recently used last
                continue
            evicted.update(dict.fromkeys(self._make_room(device, order, need)))
            device.residents[key] = need
            if (here, device_id) not in run.nodes.host_resident:
                run.nodes.host_resident.add((here, device_id))
                switch = Switch.COLD
            elif switch is Switch.NONE:
                switch = Switch.WARM
        return switch, tuple(evicted)

    def can_take_idle(self, run: PipelineRun, device_id: DeviceId) -> bool:
        """Whether nothing computes on the device and the filler's state fits there without evicting another pipeline's.

        A state of unknown size fills a device: then others leave for it, and cost a switch to come back.
        """
        device = self._state.devices[device_id]
        if device.orders or device.filler is not None or device_id in self._state.wanted_by:
            return False
        others = [size for key, size in device.residents.items() if not self._is_of_filler(key)]
        need = run.pipeline.footprint.rollout_device_bytes
        if need is None or None in others:
            return True
        return need + sum(size or 0.0 for size in others) <= device.memory_bytes

    def take_idle(self, run: PipelineRun, device_id: DeviceId, order: OrderId) -> tuple[Switch, tuple[Resident, ...]]:
        """Let a filler's order compute on a device that `can_take_idle`; returns its switch and what leaves for it."""
        device = self._state.devices[device_id]
        device.filler = order
        key, need = (run.pipeline.id, Phase.ROLLOUT), run.pipeline.footprint.rollout_device_bytes
        if key in device.residents:
            return Switch.NONE, ()
        evicted = self._make_room(device, order, need)
        device.residents[key] = need
        if (Phase.ROLLOUT, device_id) in run.nodes.host_resident:
            return Switch.WARM, tuple(evicted)
        run.nodes.host_resident.add((Phase.ROLLOUT, device_id))
        return Switch.COLD, tuple(evicted)

    def _is_of_filler(self, resident: tuple[PipelineId, Phase]) -> bool:
        return resident[0] in self._state.fillers.members

    def release(self, order: Order) -> None:
        """Give back the devices of an order that has ended."""
        for device_id in order.devices:
            device = self._state.devices[device_id]
            if device.filler == order.id:
                device.filler = None
            else:
                del device.orders[order.id]

    def change_fraction(self, order: Order, device_fraction: float) -> None:
        """Give a running order another fraction of its devices. Raises IllegalTransitionError where it is not free."""
        for device in order.devices:
            others = sum(held for other, held in self._state.devices[device].orders.items() if other != order.id)
            is_free = device_fraction > 0.0 and others + device_fraction <= 1.0 + FRACTION_TOLERANCE
            if not is_free or order.device_fraction == 0.0:
                raise self._journal.illegal(f"order {order.id} gets {device_fraction} of {device}")
        if device_fraction != order.device_fraction:
            order.device_fraction = device_fraction
            is_apart = order.phase is Phase.ROLLOUT and is_tail(
                self._state.runs[order.pipeline].pipeline, device_fraction
            )
            for device in order.devices:
                self._state.devices[device].orders[order.id] = device_fraction
                if is_apart:
                    self._state.devices[device].residents.pop((order.pipeline, order.phase), None)

    def remove_state(self, run: PipelineRun, phase: Phase, device: DeviceId) -> None:
        """The pipeline's state is on the device no longer."""
        self._state.devices[device].residents.pop((run.pipeline.id, phase), None)

    def forget_state(self, run: PipelineRun, phase: Phase, device: DeviceId) -> None:
        """The worker that kept the pipeline's state, on the device or in host memory, is gone."""
        self.remove_state(run, phase, device)
        run.nodes.host_resident.discard((phase, device))

    def forget_states(self, run: PipelineRun) -> None:
        """The pipeline's processes are gone: nothing of it lies anywhere."""
        for phase, device in device_keys(run):
            self.remove_state(run, phase, device)
        run.nodes.host_resident.clear()

    def _make_room(self, device: DeviceState, order: OrderId, need: float | None) -> list[Resident]:
        """Evict least recently used states until `need` bytes fit beside the rest."""
        if _fits(device, need):
            return []
        computing = {
            (self._state.orders[other].pipeline, self._state.orders[other].phase_on(device.id))
            for other in device.orders
            if other != order
        }
        evicted: list[Resident] = []
        in_order = list(device.residents)
        if self._state.fillers.members:
            in_order.sort(key=lambda resident: not self._is_of_filler(resident))
        for resident in in_order:
            if _fits(device, need):
                return evicted
            if resident not in computing:
                del device.residents[resident]
                evicted.append(Resident(*resident))
        if not _fits(device, need):
            raise self._journal.illegal(f"{need} bytes do not fit on {device.id} beside {sorted(computing)}")
        return evicted


def _fits(device: DeviceState, need: float | None) -> bool:
    """Whether a state of `need` bytes fits beside the residents; None is a state of unknown size, which fills the
    device."""
    if not device.residents:
        return True
    total = need
    for size in device.residents.values():
        if total is None or size is None:
            return False
        total += size
    return total is not None and total <= device.memory_bytes
