"""All that a policy's author imports.

    from rlmux.policy import GroupPlan, Pipeline, PlacementChoice, PlacementView, RunWork, start_where_free

    the interface        Policy, and what a method gets and returns
    ways to choose       `impossible`, `sharing_everything`, `queue` for `place`; `start_where_free`,
                         `start_oldest_first` for `dispatch`

docs/how-to/write-a-policy.md has a whole policy. Built-in policies and a user's own pass the same scheduler.
"""

from rlmux.core.decision.plan import (
    ChangeFraction,
    Choice,
    GroupPlan,
    MarkPlanned,
    MigrateWork,
    PauseOrder,
    RunWork,
)
from rlmux.core.decision.policy import Idling, Policy, TimeSlice, TurnTaking
from rlmux.core.decision.views import GroupView, MemberView, OrderView
from rlmux.core.estimation.colocation import SharingTable
from rlmux.core.model import (
    AdmissionKind,
    Cluster,
    DeviceId,
    GroupId,
    NodeId,
    Phase,
    Pipeline,
    PipelineId,
    Placement,
    Stage,
)
from rlmux.core.placement.choice import FruitlessSearch, PlacementChoice, Refusal, Relocation
from rlmux.core.placement.group_load import GroupLoad
from rlmux.core.placement.view import PlacementView
from rlmux.core.work import ReadyWork
from rlmux.policies.lookahead.dispatching import start_oldest_first, start_where_free
from rlmux.policies.search.candidates import founding, impossible, joining, queue, sharing_everything

__all__ = [
    "AdmissionKind",
    "ChangeFraction",
    "Choice",
    "Cluster",
    "DeviceId",
    "FruitlessSearch",
    "GroupId",
    "GroupLoad",
    "GroupPlan",
    "GroupView",
    "Idling",
    "MarkPlanned",
    "MemberView",
    "MigrateWork",
    "NodeId",
    "OrderView",
    "PauseOrder",
    "Phase",
    "Pipeline",
    "PipelineId",
    "Placement",
    "PlacementChoice",
    "PlacementView",
    "Policy",
    "ReadyWork",
    "Refusal",
    "Relocation",
    "RunWork",
    "SharingTable",
    "Stage",
    "TimeSlice",
    "TurnTaking",
    "founding",
    "impossible",
    "joining",
    "queue",
    "sharing_everything",
    "start_oldest_first",
    "start_where_free",
]
