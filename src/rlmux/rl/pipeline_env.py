"""The user's side of one pipeline: prompts out, turns in, scored batches out. Pure Python, its own process.

    begin_step(n) ──▶ requests ──▶ (rollout) ──▶ on_turns ──▶ replies: the environment spoke, go on
                                                    │  │ └──▶ released: over, the slot is free
                                                    │  └────▶ later: the environment is still thinking
                                                    ▼
                               all scored: is_step_complete(n) ──▶ finish_step(n) ──▶ TrainingBatch

    an episode:   begun ──▶ (turn ──▶ reply)* ──▶ over ──▶ scored

Invariants: everything that comes out is a function of the config and of the turns that came in, whatever their
order and grouping; a turn delivered twice is answered alike and counted once; steps may overlap. Nothing here
knows who shares the machine.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from itertools import groupby
from typing import Any

from rlmux.core.errors import IllegalTransitionError, PipelineError, UserError
from rlmux.rl.algorithms import ALGORITHMS
from rlmux.rl.config import TrainingConfig
from rlmux.rl.demonstrations import Demonstration, demonstration_batch
from rlmux.rl.rewards import Reward
from rlmux.rl.tasks import Environment, Task, make_task
from rlmux.rl.types import (
    FinishedTurn,
    Prompt,
    TrainingBatch,
    Trajectory,
    TrajectoryId,
    TrajectoryRequest,
    TurnReply,
)
from rlmux.rl.user_code import Errands, call_each, settle
from rlmux.rl.vocabulary import Vocabulary, load_vocabulary

_KEPT_BATCHES = 3
"""Finished steps whose batch can still be asked for, after a train worker was lost."""


@dataclass(slots=True, kw_only=True)
class _Episode:
    """One trajectory's life on this side."""

    request: TrajectoryRequest
    prompt: Prompt
    environment: Environment | None = None
    """Has seen exactly the turns in `turns`; None before the first."""
    turns: list[str] = field(default_factory=list)
    replies: list[tuple[int, ...] | None] = field(default_factory=list)
    """Tokens answered to each turn; None ended the episode."""
    ending: FinishedTurn | None = None
    """Set when the episode is over; never replaced."""
    reward: float | None = None


class PipelineEnv:
    """Makes requests, answers turns, scores trajectories, builds batches."""

    def __init__(self, config: TrainingConfig) -> None:
        self._config = config
        self._algorithm = _algorithm_of(config)
        self._vocabulary: Vocabulary = load_vocabulary(config.model)
        self._task: Task = make_task(config.task, seed=config.seed, vocabulary=self._vocabulary)
        self._reward = Reward(self._task, config.task)
        self._stop_tokens = _stop_tokens(self._task, self._vocabulary)
        self._episodes_by_step: dict[int, dict[TrajectoryId, _Episode]] = {}
        self._batch_by_step: dict[int, TrainingBatch] = {}
        self._last_finished_step = 0
        self._asked: dict[TrajectoryId, FinishedTurn] = {}
        """Not answered yet."""
        self._thoughts: Errands[TrajectoryId] = Errands(self._limit_s)
        self._said: dict[TrajectoryId, list[str]] = {}
        """All that was said to an environment that is thinking."""

    @property
    def vocabulary(self) -> Vocabulary:
        return self._vocabulary

    @property
    def is_single_turn(self) -> bool:
        """No reply ever comes: a stop ends the trajectory."""
        return self._task.is_single_turn

    def begin_step(self, step: int) -> list[TrajectoryRequest]:
        """The step's requests, in id order. Again for a step under way: the same, nothing is forgotten."""
        if step <= self._last_finished_step:
            raise IllegalTransitionError(
                f"pipeline {self._config.name}: step {step} was to begin after step {self._last_finished_step} ended"
            )
        if step not in self._episodes_by_step:
            self._episodes_by_step[step] = {
                request.id: _Episode(request=request, prompt=prompt) for prompt, request in self._requests_of(step)
            }
        return [episode.request for episode in self._episodes_by_step[step].values()]

    def unfinished_requests(self, step: int) -> list[TrajectoryRequest]:
        """Those of a begun step whose trajectories are not over: what to sample again after a crash."""
        return [episode.request for episode in self._begun(step).values() if episode.ending is None]

    def on_turns(
        self, finished: Sequence[FinishedTurn], patience_s: float | None = None
    ) -> tuple[list[TurnReply], list[TrajectoryId]]:
        """Answer turns: with the environment's reply, or by releasing a trajectory that is over.

        Environments that make it wait think beside each other. With `patience_s` it waits for the first of them and so
        many seconds at most; what is not answered then is in a later call, be it one without turns.
        """
        asked = sorted({turn.id: turn for turn in finished}.values(), key=lambda turn: turn.id)
        self._ask_environments(asked, [self._episode_of(turn) for turn in asked])
        self._asked.update((turn.id, turn) for turn in asked)
        self._hear(patience_s)
        turns = [turn for _, turn in sorted(self._asked.items()) if not self._is_thought_about(turn)]
        for turn in turns:
            del self._asked[turn.id]
        episodes = [self._episode_of(turn) for turn in turns]
        replies: list[TurnReply] = []
        ended: list[_Episode] = []
        for turn, episode in zip(turns, episodes, strict=True):
            if episode is None or episode.ending is not None:
                continue
            reply = self._reply_to(turn, episode)
            if reply is None:
                episode.ending = turn
                ended.append(episode)
            else:
                replies.append(TurnReply(id=turn.id, tokens=reply))
        self._score(ended)
        going_on = {reply.id for reply in replies}
        return replies, [turn.id for turn in turns if turn.id not in going_on]

    def is_step_complete(self, step: int) -> bool:
        """Every trajectory of the step is scored."""
        if step in self._batch_by_step:
            return True
        return all(episode.reward is not None for episode in self._begun(step).values())

    def finish_step(self, step: int) -> TrainingBatch:
        """The step's batch in index order. May be asked again for the last few steps."""
        if step in self._batch_by_step:
            return self._batch_by_step[step]
        if not self.is_step_complete(step):
            missing = sum(episode.reward is None for episode in self._begun(step).values())
            raise IllegalTransitionError(
                f"pipeline {self._config.name}: step {step} was to finish with {missing} trajectories unscored"
            )
        trajectories = [_trajectory_of(episode) for episode in self._begun(step).values()]
        advantages: list[float] = []
        for _, group in groupby(trajectories, key=lambda trajectory: trajectory.id.prompt):
            advantages += self._algorithm.advantages([trajectory.reward for trajectory in group])
        batch = TrainingBatch(step=step, trajectories=tuple(trajectories), advantages=tuple(advantages))
        for trajectory in [one for one in self._said if one.step == step]:
            self._let_go(trajectory)
        del self._episodes_by_step[step]
        self._batch_by_step[step] = batch
        for old in [kept for kept in self._batch_by_step if kept <= step - _KEPT_BATCHES]:
            del self._batch_by_step[old]
        self._last_finished_step = max(self._last_finished_step, step)
        return batch

    def warm_start_batch(self, update_index: int) -> list[Demonstration]:
        """(prompt_tokens, answer_tokens, is_sampled) of each demonstration of one update."""
        return demonstration_batch(self._config, self._task, self._vocabulary, update_index)

    def _requests_of(self, step: int) -> Iterable[tuple[Prompt, TrajectoryRequest]]:
        algorithm, rollout = self._config.algorithm, self._config.rollout
        for place in range(algorithm.prompts_per_step):
            index = (step - 1) * algorithm.prompts_per_step + place
            prompt: Prompt = self._call_user(
                f"prompt {index} of task {self._config.task.name!r}", partial(self._task.prompt, index)
            )
            tokens = self._vocabulary.encode(prompt.text)
            if not 1 <= len(tokens) <= rollout.max_prompt_tokens:
                raise PipelineError(
                    f"prompt {index} of task {self._config.task.name!r} has {len(tokens)} tokens; "
                    f"accepted: 1 to rollout.max_prompt_tokens {rollout.max_prompt_tokens}"
                )
            for sample in range(algorithm.group_size):
                yield (
                    prompt,
                    TrajectoryRequest(
                        id=TrajectoryId(step, place, sample),
                        prompt_tokens=tokens,
                        max_new_tokens=rollout.max_new_tokens,
                        stop_tokens=self._stop_tokens,
                        seed=self._config.seed,
                    ),
                )

    def _begun(self, step: int) -> dict[TrajectoryId, _Episode]:
        if step not in self._episodes_by_step:
            raise IllegalTransitionError(f"pipeline {self._config.name}: step {step} is not under way")
        return self._episodes_by_step[step]

    def _episode_of(self, turn: FinishedTurn) -> _Episode | None:
        """None for a late turn of a step that is over, perhaps before this host was started."""
        newest = max(self._episodes_by_step, default=0)
        if turn.id.step not in self._episodes_by_step and turn.id.step <= max(newest, self._last_finished_step):
            return None
        return self._begun(turn.id.step)[turn.id]

    def _ask_environments(self, turns: Sequence[FinishedTurn], episodes: Sequence[_Episode | None]) -> None:
        """Have every environment that is due speak, or begin to think."""
        if self._task.is_single_turn:
            return
        due: list[tuple[_Episode, str, Environment]] = []
        for turn, episode in zip(turns, episodes, strict=True):
            if episode is None or episode.ending is not None or turn.stop_reason == "length":
                continue
            said = self._turn_texts(turn)
            if episode.turns[: len(said)] == said or self._said.get(turn.id) == said:
                continue
            if turn.id in self._said:  # about a turn that was taken back by a crash
                self._let_go(turn.id)
                episode.environment = None
            environment = self._environment_after(episode, said[:-1])
            if environment is not None:
                due.append((episode, said[-1], environment))
        calls = [(_environment_name(episode), partial(environment.reply, text)) for episode, text, environment in due]
        results = call_each(calls, self._limit_s)
        for (episode, text, _), (name, _), result in zip(due, calls, results, strict=True):
            if inspect.isawaitable(result):
                self._said[episode.request.id] = [*episode.turns, text]
                self._thoughts.begin(episode.request.id, name, result)
            else:
                self._heard(episode, text, result)

    def _hear(self, patience_s: float | None) -> None:
        for trajectory, result in self._thoughts.wait(patience_s).items():
            episode = self._begun(trajectory.step)[trajectory]
            self._heard(episode, self._said.pop(trajectory)[-1], result)

    def _let_go(self, trajectory: TrajectoryId) -> None:
        """Nobody waits for what its environment thinks."""
        self._thoughts.drop(trajectory)
        del self._said[trajectory]

    def _heard(self, episode: _Episode, text: str, result: Any) -> None:
        episode.turns.append(text)
        episode.replies.append(self._reply_tokens(_environment_name(episode), result))

    def _is_thought_about(self, turn: FinishedTurn) -> bool:
        said = self._said.get(turn.id)
        return said is not None and turn.stop_reason != "length" and self._turn_texts(turn) == said

    def _environment_after(self, episode: _Episode, earlier: list[str]) -> Environment | None:
        """The episode's environment, having seen `earlier`: replayed in a fresh one if the story differs."""
        if episode.environment is not None and episode.turns == earlier:
            return episode.environment
        name = _environment_name(episode)
        episode.environment = self._call_user(name, partial(self._task.environment, episode.prompt))
        episode.turns, episode.replies = [], []
        if episode.environment is None:
            return None
        for text in earlier:
            result = self._call_user(name, partial(episode.environment.reply, text))
            episode.turns.append(text)
            episode.replies.append(self._reply_tokens(name, result))
        return episode.environment

    def _reply_tokens(self, name: str, result: Any) -> tuple[int, ...] | None:
        if result is None:
            return None
        if not isinstance(result, str) or not result:
            found = "an empty text" if result == "" else type(result).__name__
            raise PipelineError(f"{name} replied {found}; accepted: a text, or None when over")
        return self._vocabulary.encode(result)

    def _reply_to(self, turn: FinishedTurn, episode: _Episode) -> tuple[int, ...] | None:
        """The recorded answer to this turn, or None: the trajectory is over."""
        if turn.stop_reason == "length" or episode.environment is None:
            return None
        reply = episode.replies[len(self._turn_texts(turn)) - 1]
        if reply is None:
            return None
        # A reply that leaves the model no token to speak with ends the trajectory without it.
        leaves_room = len(turn.tokens) + len(reply) < episode.request.max_new_tokens
        return reply if leaves_room else None

    def _turn_texts(self, turn: FinishedTurn) -> list[str]:
        """What the model said in each of its turns."""
        return [
            self._vocabulary.decode([token for token, _ in run])
            for is_sampled, run in groupby(zip(turn.tokens, turn.is_sampled, strict=True), key=lambda pair: pair[1])
            if is_sampled
        ]

    def _score(self, ended: Sequence[_Episode]) -> None:
        """Reward those whose turn it is: each by itself, or its prompt group once that is over."""
        if self._reward.is_grouped:
            batches = self._groups_over(ended)
        else:
            batches = [[episode] for episode in ended]
        calls = [(self._score_name(batch), self._score_call(batch)) for batch in batches]
        for batch, result in zip(batches, settle(calls, self._limit_s), strict=True):
            rewards = self._reward.check(result, len(batch))
            for episode, reward in zip(batch, rewards, strict=True):
                episode.reward = reward

    def _groups_over(self, ended: Sequence[_Episode]) -> list[list[_Episode]]:
        groups = []
        for step, prompt in dict.fromkeys((each.request.id.step, each.request.id.prompt) for each in ended):
            group = [each for each in self._begun(step).values() if each.request.id.prompt == prompt]
            if all(each.ending is not None for each in group):
                groups.append(group)
        return groups

    def _score_name(self, batch: Sequence[_Episode]) -> str:
        return f"{self._reward.name} at {_place(batch[0])}"

    def _score_call(self, batch: Sequence[_Episode]) -> Callable[[], Any]:
        responses = [self._vocabulary.decode(_ending_of(episode).tokens) for episode in batch]
        return partial(self._reward.call, batch[0].prompt, responses)

    def _call_user(self, name: str, call: Callable[[], Any]) -> Any:
        (result,) = settle([(name, call)], self._limit_s)
        return result

    @property
    def _limit_s(self) -> float:
        return self._config.task.reward_timeout_s


def _algorithm_of(config: TrainingConfig) -> Any:
    name = config.algorithm.name
    if name not in ALGORITHMS:
        close = get_close_matches(name, ALGORITHMS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UserError(f"algorithm.name: {name!r}; {hint}accepted: {', '.join(ALGORITHMS)}")
    if config.algorithm.group_size < 2:
        raise UserError(
            f"algorithm.group_size: {config.algorithm.group_size}; accepted: 2 or more, "
            "since trajectories of one prompt are compared with each other"
        )
    return ALGORITHMS[name]


def _stop_tokens(task: Task, vocabulary: Vocabulary) -> tuple[int, ...]:
    tokens = list(vocabulary.stop_tokens)
    for text in task.stop:
        encoded = vocabulary.encode(text)
        if len(encoded) != 1:
            raise UserError(f"model.path: its tokenizer makes {len(encoded)} tokens of the stop text {text!r}, not 1")
        tokens += encoded
    return tuple(dict.fromkeys(tokens))


def _trajectory_of(episode: _Episode) -> Trajectory:
    ending = _ending_of(episode)
    assert episode.reward is not None
    return Trajectory(
        id=ending.id,
        prompt_tokens=episode.request.prompt_tokens,
        tokens=ending.tokens,
        is_sampled=ending.is_sampled,
        logprobs=ending.logprobs,
        versions=ending.versions,
        reward=episode.reward,
        stop_reason=ending.stop_reason,
        num_turns=ending.num_turns,
    )


def _ending_of(episode: _Episode) -> FinishedTurn:
    assert episode.ending is not None
    return episode.ending


def _environment_name(episode: _Episode) -> str:
    return f"the environment at {_place(episode)}"


def _place(episode: _Episode) -> str:
    step, prompt, sample = episode.request.id
    return f"step {step} prompt {prompt} sample {sample}"
