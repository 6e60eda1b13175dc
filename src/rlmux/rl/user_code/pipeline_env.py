"""Prompts, environments and rewards of one pipeline; the env worker process holds one. Pure Python.

    begin_step(n) ──▶ requests ──▶ (rollout) ──▶ on_turns ──▶ the environments' replies; the episode continues
                                                    │  │ └──▶ released: over, the slot is free
                                                    │  └────▶ in a later call: the environment has not replied yet
                                                    ▼
                               all scored: is_step_complete(n) ──▶ finish_step(n) ──▶ TrainingBatch

    Episode   one trajectory's life here     Conversations   the environments
    Reward    the reward in this process     RewardPool      the reward in processes of its own

Invariants: everything that comes out is a function of the config and of the turns that came in, whatever their
order and grouping; a turn delivered twice is answered alike and counted once; steps may overlap. Nothing here
depends on what else the machine runs. Under tail batching (`prompt_rounds.py`) more requests are made than a step
trains on: only turns of those that are kept come in, and only they are scored. Interruptible rollouts
(`epoch_clock.py`) have requests of several steps in progress, and choose the trajectories of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlmux.core.errors import IllegalTransitionError, PipelineError, UserError
from rlmux.rl.agents.outcomes import Outcome, counted, worth_of
from rlmux.rl.algorithms import ALGORITHMS
from rlmux.rl.config import TrainingConfig
from rlmux.rl.conversations import Conversations
from rlmux.rl.episode import Episode, parts_of
from rlmux.rl.loading import call_and_await
from rlmux.rl.prompts.epoch_clock import Admitted, ClockState
from rlmux.rl.prompts.learned_lengths import LearnedLengths
from rlmux.rl.prompts.prompt_rounds import PromptQueue, Round, check_task
from rlmux.rl.tasks import Task, is_of_user, make_task
from rlmux.rl.types import (
    FinishedTurn,
    Prompt,
    RoundRecord,
    TrainingBatch,
    Trajectory,
    TrajectoryId,
    TrajectoryRequest,
    TurnReply,
)
from rlmux.rl.user_code.reward_pool import make_reward
from rlmux.rl.user_code.rewards import Response, RewardCall
from rlmux.rl.vocabulary import Vocabulary, load_vocabulary, prompt_tokens_of, stop_tokens_of

if TYPE_CHECKING:
    from rlmux.rl.agents.session_board import SessionBoard

_KEPT_BATCHES = 3
"""Finished steps whose batches are kept for a restart of a train worker."""


class PipelineEnv:
    """Makes requests, answers turns, scores trajectories, builds batches."""

    def __init__(
        self,
        config: TrainingConfig,
        *,
        on_answer: Callable[[], None] = lambda: None,
        prompts: PromptQueue | None = None,
        clock: ClockState | None = None,
        code_folder: Path | None = None,
    ) -> None:
        """`on_answer`: called after each call of the user's code. `prompts`: where the pipeline stands in them, with
        tail batching; `clock`: with interruptible rollouts; None: at its first step. `code_folder`: where the commands
        of programs are looked for first.

        Raises UserError for an unknown task or algorithm and for options out of range.
        """
        self._config = config
        self._on_answer = on_answer
        self._algorithm = _algorithm_of(config)
        self._vocabulary: Vocabulary = load_vocabulary(config.model)
        self._task: Task = make_task(config.task, seed=config.seed, vocabulary=self._vocabulary)
        check_task(config, self._task)
        self._reward = make_reward(self._task, config.task, config.num_steps)
        self._stop_tokens = () if config.fills_token_limit else stop_tokens_of(self._vocabulary, self._task.stop)
        self._episodes_by_step: dict[int, dict[TrajectoryId, Episode]] = {}
        """All episodes of each step under way, in id order."""
        self._batch_by_step: dict[int, TrainingBatch] = {}
        """Batches of the last finished steps."""
        self._last_finished_step = 0
        self._queue = prompts or PromptQueue()
        """The prompts of tail batching after the last finished step."""
        self._admitted = None if config.rollout.interruptible is None else Admitted(config, clock or ClockState())
        """Prompts that interruptible rollouts may sample; None: each step samples what it trains on."""
        self._lengths = LearnedLengths() if config.rollout.order == "longest" else None
        self._counts_outcomes = (
            config.task.is_agent or config.task.environment is not None or is_of_user(config.task.name)
        )
        """Whether programs or environments are the user's, which may fail."""
        self._conversations: Conversations | SessionBoard
        if config.task.is_agent:
            from rlmux.rl.agents.session_board import SessionBoard

            self._conversations = SessionBoard(config, self._vocabulary, code_folder, on_answer)
        else:
            self._conversations = Conversations(
                self._task, self._vocabulary, self._limit_s, config.task.num_retries, on_answer
            )
        self._unanswered: dict[TrajectoryId, FinishedTurn] = {}
        """Turns that `on_turns` has not answered yet."""

    @property
    def vocabulary(self) -> Vocabulary:
        """The tokenizer of the pipeline's model."""
        return self._vocabulary

    @property
    def is_single_turn(self) -> bool:
        """Whether there are no replies, so that a stop ends the trajectory."""
        return self._task.is_single_turn

    def begin_step(self, step: int) -> list[TrajectoryRequest]:
        """The step's requests, in id order; the same ones again for a step under way, which keeps what it has.

        Raises PipelineError for a prompt that does not fit, IllegalTransitionError for a step that is over.
        """
        if step <= self._last_finished_step:
            raise IllegalTransitionError(
                f"pipeline {self._config.name}: step {step} was to begin after step {self._last_finished_step} ended"
            )
        if self._admitted is not None:
            for admitted in self._admitted.steps_new_in(step):
                self._begin(admitted, self._admitted.is_open)
            return [episode.request for episodes in self._episodes_by_step.values() for episode in episodes.values()]
        if step not in self._episodes_by_step:
            self._begin(step)
        return [episode.request for episode in self._episodes_by_step[step].values()]

    def _begin(self, step: int, is_wanted: Callable[[TrajectoryId], bool] = lambda _: True) -> None:
        self._episodes_by_step[step] = {
            request.id: Episode(request=request, prompt=prompt)
            for prompt, request in self._requests_of(step)
            if is_wanted(request.id)
        }
        if not isinstance(self._conversations, Conversations):
            self._conversations.begin(self._episodes_by_step[step].values())

    def unfinished_requests(self, step: int) -> list[TrajectoryRequest]:
        """Requests of a begun step whose trajectories are not over: sampled again after a crash."""
        return [episode.request for episode in self._begun(step).values() if episode.ending is None]

    def on_turns(
        self, finished: Sequence[FinishedTurn], patience_s: float | None = None
    ) -> tuple[list[TurnReply], list[TrajectoryId]]:
        """Answer turns: (replies of the environments, ids of trajectories that are over).

        Environments that wait for something wait together. With `patience_s` seconds, the call ends soon after the
        first reply, or when they have passed; what is not answered then is in a later call, be it one without turns.
        Raises PipelineError where the user's code fails.
        """
        new = sorted({turn.id: turn for turn in finished}.values(), key=lambda turn: turn.id)
        known = [(turn, episode) for turn in new if (episode := self._episode_of(turn)) is not None]
        self._conversations.send_turns(known)
        self._unanswered.update((turn.id, turn) for turn in new)
        self._conversations.collect(patience_s)
        turns = [turn for _, turn in sorted(self._unanswered.items()) if not self._conversations.is_pending(turn)]
        for turn in turns:
            del self._unanswered[turn.id]
        replies: list[TurnReply] = []
        released: list[TrajectoryId] = []
        ended: list[Episode] = []
        for turn, episode in [(turn, self._episode_of(turn)) for turn in turns]:
            reply = None
            if episode is not None and episode.ending is None:
                reply = self._conversations.reply_to(turn, episode)
                if reply is not None and not episode.has_room_for(reply, turn):
                    turn, reply = replace(turn, stop_reason="length"), None
                if reply is None:
                    episode.ending = turn
                    ended.append(episode)
            if reply is None:
                released.append(turn.id)
            else:
                replies.append(reply)
        self._score(ended)
        return replies, released

    def close(self) -> None:
        """End the programs that run."""
        if not isinstance(self._conversations, Conversations):
            self._conversations.close()

    def is_step_complete(self, step: int) -> bool:
        """Whether every trajectory of the step is scored."""
        if step in self._batch_by_step:
            return True
        return self._num_unscored(step) == 0

    def finish_step(self, step: int, ids: Sequence[TrajectoryId] | None = None) -> TrainingBatch:
        """The step's batch in id order; again for the last few steps. `ids`: what it is made of, where rollouts are
        interruptible.

        Raises IllegalTransitionError while a trajectory is not scored.
        """
        if step in self._batch_by_step:
            return self._batch_by_step[step]
        scored = self._take_scored(step, ids)
        trajectories = [episode.to_trajectory() for episode in scored]
        advantages: list[float] = []
        for _, group in groupby(trajectories, key=lambda trajectory: trajectory.id[:2]):
            advantages += self._advantages(list(group))
        batch = TrainingBatch(
            step=step,
            trajectories=tuple(trajectories),
            advantages=tuple(advantages),
            logged=self._logged(trajectories, [each.outcome for each in scored if each.outcome is not None]),
            round=self._end_round(step, trajectories),
        )
        if self._lengths is not None:
            self._lengths.learn(_answer_lengths(scored))
        for over in [each for each in (*self._episodes_by_step,) if not self._episodes_by_step[each]]:
            self._conversations.drop_step(over)
            del self._episodes_by_step[over]
        self._batch_by_step[step] = batch
        for old in [kept for kept in self._batch_by_step if kept <= step - _KEPT_BATCHES]:
            del self._batch_by_step[old]
        self._last_finished_step = max(self._last_finished_step, step)
        return batch

    def _logged(self, trajectories: Sequence[Trajectory], outcomes: Sequence[Outcome]) -> dict[str, float]:
        """What the reward function logged, and how programs and environments ended, by metric."""
        failed = [outcome for outcome in outcomes if outcome.kind == "failed"]
        if failed and len(failed) == len(trajectories):
            raise PipelineError(
                f"all {len(failed)} trajectories of step {trajectories[0].id.step} failed, {failed[0].num_retries + 1} "
                f"times each (task.retries); the first: {failed[0].text}"
            )
        logged = self._reward.logged.take_means(dict.fromkeys(each.id.step for each in trajectories))
        return {**logged, **counted(outcomes)} if self._counts_outcomes else logged

    def _advantages(self, group: Sequence[Trajectory]) -> list[float]:
        """Of the trajectories of a prompt group: 0 for one that is not judged, or has none to be compared with."""
        rewards = [each.reward for each in group if each.is_judged]
        if len(rewards) < 2:  # a filler may ask for one answer of each prompt
            return [0.0] * len(group)
        advantages = iter(self._algorithm.advantages(rewards))
        return [next(advantages) if each.is_judged else 0.0 for each in group]

    def _take_scored(self, step: int, ids: Sequence[TrajectoryId] | None) -> list[Episode]:
        """The episodes of the step's batch; the env forgets them, and those that the step does without."""
        if ids is None:
            if missing := self._num_unscored(step):
                raise IllegalTransitionError(
                    f"pipeline {self._config.name}: step {step} was to finish with {missing} trajectories unscored"
                )
            episodes, self._episodes_by_step[step] = self._begun(step), {}
            return [episode for episode in episodes.values() if episode.is_scored]
        unscored = [id for id in ids if not self._begun(id.step)[id].is_scored]
        if unscored:
            raise IllegalTransitionError(
                f"pipeline {self._config.name}: step {step} was to finish with {len(unscored)} trajectories unscored"
            )
        return [self._episodes_by_step[id.step].pop(id) for id in ids]

    def _round(self, step: int) -> Round:
        """The prompts of a step, and the number of answers to each."""
        algorithm = self._config.algorithm
        if self._config.rollout.tail_batching is not None:
            return self._queue.round(step, self._config)
        first = (step - 1) * algorithm.prompts_per_step
        prompts = tuple(range(first, first + algorithm.prompts_per_step))
        return Round(prompts=prompts, group_size=algorithm.group_size, is_long=False)

    def _end_round(self, step: int, trajectories: Sequence[Trajectory]) -> RoundRecord | None:
        """The tail-batching record of a step that trains on these; advances the queue."""
        if self._config.rollout.tail_batching is None:
            return None
        round = self._round(step)
        places = list(dict.fromkeys(trajectory.id.prompt for trajectory in trajectories))
        self._queue = self._queue.after(round, places)
        return RoundRecord(
            is_long=round.is_long,
            num_cut=len(round.prompts) * round.group_size - len(trajectories),
            prompts=tuple(round.prompts[place] for place in places),
            queue_after=self._queue.fields(),
        )

    def _num_unscored(self, step: int) -> int:
        """Trajectories that the step's batch still needs."""
        algorithm = self._config.algorithm
        scored = sum(episode.is_scored for episode in self._begun(step).values())
        return algorithm.prompts_per_step * algorithm.group_size - scored

    def _requests_of(self, step: int) -> Iterable[tuple[Prompt, TrajectoryRequest]]:
        rollout, round = self._config.rollout, self._round(step)
        for place, index in enumerate(round.prompts):
            prompt: Prompt = self._call_user(
                f"prompt {index} of task {self._config.task.name!r}", partial(self._task.prompt, index)
            )
            is_session = self._config.task.is_agent
            tokens = () if is_session else prompt_tokens_of(self._vocabulary, prompt)
            if not is_session and not 1 <= len(tokens) <= rollout.max_prompt_tokens:
                raise PipelineError(
                    f"prompt {index} of task {self._config.task.name!r} has {len(tokens)} tokens; "
                    f"accepted: 1 to rollout.max_prompt_tokens {rollout.max_prompt_tokens}"
                )
            for sample in range(round.group_size):
                yield (
                    prompt,
                    TrajectoryRequest(
                        id=TrajectoryId(step, place, sample),
                        prompt_tokens=tokens,
                        max_new_tokens=rollout.max_new_tokens,
                        stop_tokens=self._stop_tokens,
                        seed=self._config.seed,
                        expected_tokens=0 if self._lengths is None else self._lengths.expected(tokens),
                        is_session=is_session,
                    ),
                )

    def _begun(self, step: int) -> dict[TrajectoryId, Episode]:
        if step not in self._episodes_by_step:
            raise IllegalTransitionError(f"pipeline {self._config.name}: step {step} is not under way")
        return self._episodes_by_step[step]

    def _episode_of(self, turn: FinishedTurn) -> Episode | None:
        """None for a late turn of a step that is over, perhaps since before this object was made."""
        newest = max(self._episodes_by_step, default=0)
        if turn.id.step not in self._episodes_by_step and turn.id.step <= max(newest, self._last_finished_step):
            return None
        episodes = self._begun(turn.id.step)
        return episodes[turn.id] if self._admitted is None else episodes.get(turn.id)

    def _score(self, ended: Sequence[Episode]) -> None:
        """Reward each ended episode by itself, or its whole prompt group once all of that is over.

        The outcome of a program or environment may decide the reward, whatever the function says.
        """
        who = "program" if self._config.task.is_agent else "environment"
        worths = {
            episode.request.id: worth_of(episode.outcome, self._config.task.outcomes, f"the {who} at {episode.place}")
            for episode in ended
            if episode.outcome is not None
        }
        for episode in ended:
            worth = worths.get(episode.request.id)
            if worth is not None and (worth.is_decided or self._config.task.reward is None):
                episode.reward, episode.is_scored = worth.reward, True
        if self._reward.is_grouped:
            batches = self._groups_over(ended)
        else:
            batches = [[episode] for episode in ended if not episode.is_scored]
        calls = [self._reward_call(batch) for batch in batches]
        with closing(self._reward.outcomes(calls, self._on_answer)) as outcomes:
            for batch, outcome in zip(batches, outcomes, strict=True):
                if isinstance(outcome, PipelineError):
                    raise outcome
                for episode, reward in zip(batch, outcome, strict=True):
                    if not episode.is_scored:
                        episode.reward, episode.is_scored = reward, True

    def _groups_over(self, ended: Sequence[Episode]) -> list[list[Episode]]:
        groups = []
        for step, prompt in dict.fromkeys((each.request.id.step, each.request.id.prompt) for each in ended):
            group = [each for each in self._begun(step).values() if each.request.id.prompt == prompt]
            over = [each for each in group if each.ending is not None]
            if len(over) == self._config.algorithm.group_size:
                groups.append(over)
        return groups

    def _reward_call(self, batch: Sequence[Episode]) -> RewardCall:
        return RewardCall(
            prompt=batch[0].prompt,
            responses=[self._response(episode) for episode in batch],
            step=batch[0].request.id.step,
            places=[f"at {episode.place}" for episode in batch],
        )

    def _response(self, episode: Episode) -> Response:
        if episode.session is not None:
            return self._response_of_session(episode)
        turn, turns = episode.last_turn, []
        replies = list(zip(episode.replies, episode.reply_texts, strict=True))
        for is_sampled, tokens in parts_of(turn.tokens, turn.is_sampled, episode.request.stop_tokens):
            reply, text = replies.pop(0) if replies and not is_sampled else (None, "")
            turns.append((is_sampled, text if reply == tokens else self._vocabulary.decode(tokens)))
        return Response(text=self._vocabulary.decode(turn.tokens), token_ids=turn.tokens, turns=tuple(turns))

    def _response_of_session(self, episode: Episode) -> Response:
        """What its program's longest chat holds: the messages, and all tokens behind the first question."""
        trajectory = episode.to_trajectory()
        tokens = trajectory.tokens
        parts = parts_of(tokens, trajectory.is_sampled, ())
        return Response(
            text=self._vocabulary.decode(tokens),
            token_ids=tokens,
            turns=tuple((is_sampled, self._vocabulary.decode(part)) for is_sampled, part in parts),
            messages=trajectory.messages,
        )

    def _call_user(self, name: str, call: Callable[[], Any]) -> Any:
        (result,) = call_and_await([(name, call)], self._limit_s, self._on_answer)
        return result

    @property
    def _limit_s(self) -> float:
        return self._config.task.reward_timeout_s


def _answer_lengths(episodes: Iterable[Episode]) -> dict[tuple[int, ...], list[int]]:
    """Response tokens of all answers of each prompt."""
    lengths: dict[tuple[int, ...], list[int]] = {}
    for episode in (each for each in episodes if each.session is None):
        lengths.setdefault(episode.request.prompt_tokens, []).append(len(episode.last_turn.tokens))
    return lengths


def _algorithm_of(config: TrainingConfig) -> Any:
    name = config.algorithm.name
    if name not in ALGORITHMS:
        close = get_close_matches(name, ALGORITHMS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UserError(f"algorithm.name: {name!r}; {hint}accepted: {', '.join(ALGORITHMS)}")
    if config.algorithm.group_size < 1:
        raise UserError(f"algorithm.group_size: {config.algorithm.group_size}; accepted: 1 or more")
    return ALGORITHMS[name]
