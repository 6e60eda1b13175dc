"""The data of RL, as frozen values that cross processes.

    env worker                   rollout engine                     train engine
    TrajectoryRequest  ───────▶  slot, one token after another
                       ◀───────  FinishedTurn
    TurnReply (environment) ──▶  continues in the same slot, or from another context
    Trajectory (scored) ─────────────────────────────────────────▶  TrainingBatch

A trajectory's random numbers are a function of (seed, step, prompt, sample, token position) and of nothing
else, so that it does not matter which worker, slot or moment made which token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rlmux.core.model import SubStage
from rlmux.rl.fast_pickle import fast_pickled
from rlmux.rl.origin import Origin


class TrajectoryId(NamedTuple):
    """Names a trajectory inside its pipeline; sorts in training order."""

    step: int
    prompt: int
    """Position of the prompt within the step, from 0."""
    sample: int
    """Position within the prompt group, from 0."""
    adapter: str = ""
    """Name of the adapter that samples it, where a rollout engine serves several pipelines; no random number depends
    on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of a dataset."""

    text: str
    """Text that the model continues."""
    answer: str | None = None
    """The right response: the SFT warm-up trains on it, and most rewards compare with it."""
    ground_truth: Any = None
    """The answer as its file has it, which may be any JSON value; None: `answer`."""
    data: Mapping[str, Any] | None = None
    """Any other columns, handed to the reward function and the environment as they are."""
    messages: Sequence[Mapping[str, Any]] | None = None
    """The messages that `text` was rendered from; None where the row has a plain text."""

    @property
    def expected(self) -> Any:
        """The answer as the reward function gets it."""
        return self.answer if self.ground_truth is None else self.ground_truth


@fast_pickled
@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryRequest:
    """A request to sample one trajectory."""

    id: TrajectoryId
    prompt_tokens: tuple[int, ...]
    max_new_tokens: int
    """Budget of the whole trajectory, environment replies included."""
    stop_tokens: tuple[int, ...]
    """A sampled token of these ends the turn (and is kept as its last token)."""
    seed: int
    """The pipeline's seed: with `id` (or `drawn_as`) and the token position it gives every random number."""
    drawn_as: TrajectoryId | None = None
    """The id that random numbers are drawn for; None: its own."""
    temperature: float | None = None
    """Temperature of the distribution sampled from, above 0; None: the engine's."""
    stop_texts: tuple[str, ...] = ()
    """Texts that end the turn as soon as the decoded response contains one; the token that completes it is kept."""
    expected_tokens: int = 0
    """Response tokens that are expected of it; 0: not known. Decides when it is sampled, never what."""
    is_session: bool = False
    """Whether its environment is a program that asks: it has no prompt before the first `TurnReply.context`, may go on
    from another one after any turn, and is over only when it is released."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedTurn:
    """A finished turn: a stop token was sampled, or the budget is used up."""

    id: TrajectoryId
    tokens: tuple[int, ...]
    """All response tokens so far, over all turns, environment replies included."""
    is_sampled: tuple[bool, ...]
    """False where the environment wrote the token: such tokens carry no loss. Same length as `tokens`."""
    logprobs: tuple[float, ...]
    """Log-probability of each token when it was sampled; 0.0 where the environment wrote it."""
    versions: tuple[int, ...]
    """Weight version that made each token."""
    stop_reason: str
    """`stop` (a stop token), `length` (budget used up, or with too little left for the environment's reply), `limit`
    (the reply's `turn_end`), or `opened` (a session that has no context yet, or lost it with its worker)."""
    num_turns: int

    @classmethod
    def opening(cls, id: TrajectoryId) -> FinishedTurn:
        """What a session that waits for its context is announced with."""
        return cls(id=id, tokens=(), is_sampled=(), logprobs=(), versions=(), stop_reason="opened", num_turns=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnReply:
    """The environment's answer to a finished turn. A trajectory that is over gets none: it is released."""

    id: TrajectoryId
    tokens: tuple[int, ...]
    """Tokens that the environment wrote; appended with `is_sampled=False`."""
    turn_end: int | None = None
    """Response tokens with which the next turn ends at the latest; None: the budget."""
    context: PartialTrajectory | None = None
    """Where a session goes on instead of where it is; `tokens` is empty then. None: where it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialTrajectory:
    """An unfinished trajectory on its way to another worker, with everything it needs to continue there.

    Per-token fields are those of `FinishedTurn`.
    """

    request: TrajectoryRequest
    tokens: tuple[int, ...]
    is_sampled: tuple[bool, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    pending_tokens: tuple[int, ...]
    """Environment tokens that were accepted but not yet fed."""
    num_turns: int
    is_waiting_for_reply: bool
    kv: Any | None
    """KV [layers, 2, kv_heads, context, head_dim] of the context, as bytes between processes; None: recompute it."""
    origin: Origin | None = None
    """Origin of the tokens; None: not marked."""
    turn_end: int | None = None
    """Response tokens with which the present turn ends at the latest; None: the budget."""


@fast_pickled
@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One complete, scored episode. Per-token fields are those of `FinishedTurn`."""

    id: TrajectoryId
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    is_sampled: tuple[bool, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    reward: float
    """0.0 where the reward function gave None."""
    stop_reason: str
    num_turns: int
    is_judged: bool = True
    """Whether it has a reward. Without one it has the advantage 0, and is in no mean of rewards."""
    branches: Sequence[Trajectory] = ()
    """Further sequences of a session, such as those of a subagent, in order of their tokens. They have its id, reward
    and advantage."""
    messages: Sequence[Mapping[str, Any]] | None = None
    """A session as the conversation that it was; None for others."""
    outcome: str | None = None
    """How a session ended, in one line; None for others."""

    @property
    def sequences(self) -> Sequence[Trajectory]:
        """Itself and its branches."""
        return (self, *self.branches)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """One step's round under tail batching, and where it leaves the pipeline's prompts."""

    is_long: bool
    """Whether its prompts are those that earlier rounds dropped."""
    num_cut: int
    """Trajectories that were launched and are not trained on."""
    prompts: tuple[int, ...]
    """Indices of the prompts that are trained on, in the order of the batch."""
    queue_after: Mapping[str, Any]
    """The queue of prompts after the step, as `PromptQueue.fields` gives it."""

    @property
    def num_queued(self) -> int:
        """Prompts that wait for a long round."""
        return len(self.queue_after["queued"])


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBatch:
    """What one step trains on: trajectories in index order and one advantage for each."""

    step: int
    trajectories: Sequence[Trajectory]
    """All prompts_per_step * group_size trajectories, sorted by id. Under tail batching ids have gaps; of interruptible
    rollouts they may be of several steps."""
    advantages: Sequence[float]
    """Advantage of each trajectory, in the same order; `rl/algorithms.py` has the formulas."""
    logged: Mapping[str, float] = field(default_factory=dict)
    """What the reward function logged, by metric."""
    origin: Origin | None = None
    """Origin of the trajectories; None: not marked."""
    round: RoundRecord | None = None
    """Result of tail batching; None without it."""
    backlog: bytes | None = None
    """A packed `rl.backlog.Backlog` that interruptible rollouts go on from after the step; None without them."""


class SubStageIterations(NamedTuple):
    """All iterations of a chunk that were of one sub-stage and one batch width."""

    sub_stage: SubStage
    """PREFILL, DENSE_DECODE or TAIL_DECODE."""
    num_rows: int
    """Rows computed in each iteration; the sequences in it are as many or fewer."""
    num_iterations: int
    tokens: int
    """Tokens of prefilled contexts, or response tokens sampled and forced."""
    ms: float
    """Milliseconds of all these iterations together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkReport:
    """Report of a bounded call of a rollout engine."""

    finished: Sequence[FinishedTurn]
    num_active: int
    """Sequences in a slot that can decode now."""
    num_waiting: int
    """Sequences that are ready for a slot and have none yet."""
    num_waiting_for_env: int
    """Trajectories that wait for their environment, in a slot or offloaded."""
    sampled_tokens: int
    """Tokens that the model sampled; neither prompts nor environment replies."""
    prefill_tokens: int
    """Tokens of prefilled contexts, padding left out."""
    decode_steps: int
    """Forward passes that made one token for each active sequence."""
    seconds: float
    """Wall-clock time of the call."""
    iterations: Sequence[SubStageIterations] = ()
    """How `seconds` were spent, sorted by sub-stage and rows."""
    progress: Mapping[TrajectoryId, int] = field(default_factory=dict)
    """Response tokens of each begun, unfinished trajectory; empty if the engine does not report them."""
    prompt_tokens: int = 0
    """Tokens of contexts whose requests a server has ended, where it says how many of them it had cached."""
    cached_tokens: int = 0
    """Those of them that its prefix cache served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReport:
    """Report of a bounded call of a train engine."""

    is_done: bool
    """The stage is complete."""
    micro_batches_done: int
    """Micro-batches of the stage done so far, earlier calls included."""
    micro_batches_total: int
    tokens: int
    """Trained tokens of this call: prompt and response, padding left out."""
    seconds: float
    """Wall-clock time of the call."""
    metrics: Mapping[str, float]
    """Empty until the stage ends, then loss, kl, grad_norm, clip_fraction, entropy where known."""
