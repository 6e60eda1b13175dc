"""All that a policy's author imports.

    from rlmux.policy import GroupView, Pipeline, PlacementChoice, PlacementView, RunWork, start_where_free

    the interface        Policy, and what a method gets and answers
    ways to answer       `impossible`, `sharing_everything`, `queue` for `place`; `start_where_free`,
                         `start_oldest_first` for `dispatch`

docs/how-to/write-a-policy.md has a whole policy. Built-in policies and a user's own pass the same scheduler.
"""

from rlmux.core.decision.policy import Policy
from rlmux.core.decision.views import (
    ChangeFraction,
    Choice,
    GroupView,
    MarkPlanned,
    MemberView,
    MigrateWork,
    OrderView,
    PauseOrder,
    RunWork,
)
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
from rlmux.core.queue.time_slicing import TakesTurns, TimeSlice
from rlmux.core.steps.idle_check import Idling
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
    "TakesTurns",
    "TimeSlice",
    "founding",
    "impossible",
    "joining",
    "queue",
    "sharing_everything",
    "start_oldest_first",
    "start_where_free",
]
