"""Every error rlmux raises on purpose.

    RlmuxError
    ├── UserError (ValueError)        the user's mistake: what, where, and what is accepted
    │   ├── SpecError                 the file or an override of it
    │   ├── RefusedError              a pipeline that cannot fit, with the numbers
    │   └── OverQuotaError            a submission that would make too many pipelines of a project or user wait
    ├── PipelineError (RuntimeError)  one pipeline's own fault: it stops, the others go on
    │   └── DeviceMemoryError         what it computes does not fit its device
    ├── WorkerLostError               a worker process went away or stopped answering
    │   └── HostMemoryError           for lack of the machine's memory
    ├── CheckpointError               a checkpoint is absent, torn or damaged: an older one may do
    ├── LogError                      the run log is unreadable, torn beyond repair, or of a newer schema
    ├── StorageError                  the disk is full or fails: the run stops, and can be resumed
    ├── ClusterLostError              the Ray cluster is gone: the run stops, and can be resumed on another
    ├── ThreadDiedError               our own bug: it ended a thread that a server needs; it stops, and can be resumed
    └── IllegalTransitionError        our own bug: an event or order that the state does not allow
        └── PolicyError               a policy's: its choice, or its way to one, breaks a promise of policies

All of them pickle, because they cross processes.
"""

from __future__ import annotations


class RlmuxError(Exception):
    """The root: `except RlmuxError` catches all that rlmux raises on purpose."""


class UserError(RlmuxError, ValueError):
    """A mistake in what the user typed or supplied. The text is one line and stands alone."""


class SpecError(UserError):
    """The spec file, or an override of it, is wrong. The text names file, line, key, value and what is accepted."""


class RefusedError(UserError):
    """A pipeline that cannot be placed, with the numbers."""


class OverQuotaError(UserError):
    """A submission after which more pipelines of a project or user would wait than its quota has. It may be taken
    later."""


class PipelineError(RlmuxError, RuntimeError):
    """A pipeline's own code or numbers failed: reward, environment, dataset, NaN loss, memory."""


class DeviceMemoryError(PipelineError):
    """What a pipeline computes takes more memory than its device has."""


class WorkerLostError(RlmuxError, ConnectionError):
    """A worker process ended or did not answer within its limit."""


class HostMemoryError(WorkerLostError):
    """A worker found too little of the machine's memory. Its successor may find enough."""


class CheckpointError(RlmuxError):
    """A checkpoint cannot be taken over. The text names the file; the caller may fall back to an older step."""


class LogError(RlmuxError):
    """The run log cannot be used: not a log, damaged, or written by a newer rlmux."""


class StorageError(RlmuxError):
    """A file of the run cannot be written. The run stops and can be resumed."""


class ClusterLostError(RlmuxError):
    """The head of the Ray cluster is gone. The run stops and can be resumed on another cluster."""


class ThreadDiedError(RlmuxError):
    """An error of ours has ended a thread that a server cannot be without. The server stops and can be resumed."""


class IllegalTransitionError(RlmuxError):
    """An event or a choice that the present state does not allow. The text shows the recent events."""


class PolicyError(IllegalTransitionError):
    """A policy chose what is not allowed, or not from its view alone. The text names the policy and the promise."""
