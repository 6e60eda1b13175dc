"""Messages of the time-slice orchestrator's protocol (llm-d-rl-time-slicing, v1alpha1), by their field numbers.

The wire carries numbers and no names of packages, so one set of messages serves both services of the protocol, the
present one and the one of its first name. They are made here, in a pool of their own: nothing is generated, and a
program that has the protocol's own stubs as well meets no second definition. An enum is written as its number.

Left out, and skipped where a client sends it: what only background participants use, and `expected_idle`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

SERVICES = (
    "timeslice_orchestrator.v1alpha1.TimeSliceOrchestratorService",
    "accelerator_orchestrator.v1alpha1.AcceleratorOrchestratorService",
)
"""Full names under which the same four calls are served."""
ROLE_BACKGROUND = 2
"""Role of a participant that borrows what no job wants."""

_PACKAGE = "rlmux.orchestrator"
_FIELDS = {
    "AcquireRequest": "string job_id = 1; string group_id = 2; int32 role = 3",
    "AcquireResponse": "bool success = 1; int64 waited_ms = 2; bool context_restored = 3",
    "YieldRequest": "string job_id = 1; string group_id = 2; int32 role = 3",
    "YieldResponse": "bool success = 1; int64 pending_waiters = 2; bool snapshot_deferred = 3",
    "ListGroupsRequest": "",
    "ListGroupsResponse": "repeated string group_ids = 1",
    "GetGroupStatusRequest": "string group_id = 1",
    "GetGroupStatusResponse": "GroupStatus group = 1; repeated AgentJobState agent_job_states = 2",
    "GroupStatus": (
        "string group_id = 1; int32 group_state = 2; Timestamp state_timestamp = 3; string locking_job = 4; "
        "string active_job = 5; int64 waiter_queue_depth = 6; string loaded_job = 7"
    ),
    "AgentJobState": "string agent = 1; int32 job_state = 2; string job_id = 3",
    "Timestamp": "int64 seconds = 1; int32 nanos = 2",
}


class GroupState(IntEnum):
    """State of a group: free, free with a job's memory still there, held, or on its way to another job."""

    IDLE = 2
    IDLE_YIELDED = 3
    LOCKED = 4
    SWITCHING = 5


class JobState(IntEnum):
    """Where a job's memory is: not on the group, on it, on its way, or stuck there."""

    IDLE = 1
    RUNNING = 2
    TRANSITIONING = 3
    FAULTED = 5


def _messages() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="rlmux/orchestrator.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for text in filter(None, fields.split("; ")):
            *repeated, kind, field_name, _, number = text.split()
            field = message.field.add(name=field_name, number=int(number))
            field.label = field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL
            if kind in _FIELDS:
                field.type, field.type_name = field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
            else:
                field.type = getattr(field, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    found = {name: pool.FindMessageTypeByName(f"{_PACKAGE}.{name}") for name in _FIELDS}
    return {name: message_factory.GetMessageClass(each) for name, each in found.items()}


MESSAGES = _messages()
"""Class of each message, by its name."""
