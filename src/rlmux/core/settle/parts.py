"""What one scheduler is made of. The functions that apply facts and settle their consequences take it as a whole.

Parts ─▶ StepMachine       each pipeline's life and steps, by tables of legal moves
      ─▶ RequestBatches    work that arrives instead of being planned
      ─▶ Groups            members of each co-execution group, and the cycle
      ─▶ Orders            what was ordered and has not ended
      ─▶ Leases            device fractions and residency
      ─▶ PlacementLedger   which pipeline is pinned to which nodes
      ─▶ Expectations      step seconds learned from a pipeline's own steps
      ─▶ AdmissionQueue    which waiting pipeline starts, and why another waits
      ─▶ Shares            what accounts have used, and who is offered room first for it
      ─▶ TimeSlices        who holds nodes next, where pipelines hold them by turns
      ─▶ PolicyFaults      decisions of the policy that failed
"""

from __future__ import annotations

from dataclasses import dataclass

from rlmux.core.decision.policy import Policy, RepeatedPolicy
from rlmux.core.decision.policy_faults import PolicyFaults
from rlmux.core.journal import Journal
from rlmux.core.model import Cluster, PipelineId
from rlmux.core.pipeline_run import PipelineRun
from rlmux.core.placement.placement_ledger import PlacementLedger
from rlmux.core.placement.view import PlacementView
from rlmux.core.queue.admission import AdmissionQueue
from rlmux.core.queue.fair_share import Shares
from rlmux.core.queue.time_slicing import TimeSlices
from rlmux.core.queue_order import QueueOrder
from rlmux.core.state import SchedulerState
from rlmux.core.steps.expected_steps import Expectations
from rlmux.core.steps.groups import Groups
from rlmux.core.steps.leases import Leases
from rlmux.core.steps.on_demand_work import RequestBatches
from rlmux.core.steps.orders import Orders
from rlmux.core.steps.step_machine import StepMachine


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """See the module."""

    cluster: Cluster
    """Pools at the prices in the user's file; the ledger has the current prices."""
    policy: Policy
    state: SchedulerState
    ledger: PlacementLedger
    placement: PlacementView
    """What policies and drivers see of the ledger."""
    journal: Journal
    shares: Shares
    leases: Leases
    orders: Orders
    groups: Groups
    queue: AdmissionQueue
    steps: StepMachine
    batches: RequestBatches
    expectations: Expectations
    turns: TimeSlices
    faults: PolicyFaults
    repeated: RepeatedPolicy | None
    """The policy, where it is called twice."""

    @classmethod
    def of(
        cls, cluster: Cluster, policy: Policy, queue_order: QueueOrder | None, *, raises_policy_faults: bool = False
    ) -> Parts:
        """The parts of a scheduler to which nothing was submitted yet."""
        state, journal = SchedulerState(), Journal(policy.name)
        ledger = PlacementLedger(cluster, state.work_left, lambda: len(state.waiting))
        ledger.policy_caches = state.policy_caches
        shares = Shares(cluster, state, queue_order)
        leases = Leases(cluster, state, journal)
        orders = Orders(state, leases, shares, journal)
        groups = Groups(cluster, state, ledger, leases, shares)
        steps = StepMachine(state, orders, journal)
        faults = PolicyFaults(state, policy.name, raises=raises_policy_faults)
        return cls(
            cluster=cluster,
            policy=policy,
            state=state,
            ledger=ledger,
            placement=PlacementView(ledger),
            journal=journal,
            shares=shares,
            leases=leases,
            orders=orders,
            groups=groups,
            queue=AdmissionQueue(state, ledger, policy, shares, faults),
            steps=steps,
            batches=RequestBatches(state, orders, steps, groups, journal),
            expectations=Expectations(state, ledger, journal),
            turns=TimeSlices(state, ledger, policy, shares, faults),
            faults=faults,
            repeated=policy if isinstance(policy, RepeatedPolicy) else None,  # once: the look takes 12 us
        )

    def run(self, pipeline: PipelineId) -> PipelineRun:
        """Raises IllegalTransitionError for a pipeline that was not submitted."""
        try:
            return self.state.runs[pipeline]
        except KeyError:
            raise self.journal.illegal(f"no pipeline {pipeline} was submitted") from None
