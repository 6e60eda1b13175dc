"""Checks a pipeline's prompts and reward before anything starts.

    TrainingConfig ── vocabulary ── task ──▶ every row of a file, or the prompts of the first step
                                       ├───▶ environment: imported, made from prompt 0, called with one turn
                                       └───▶ reward: imported, its signature read, called once on a sample

Every complaint is one line that begins with the key to change ("task.reward: ..."), or with a file and its row. The
user's code has the time limit here that it has in training. Nothing needs torch, unless a tokenizer brings it along.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from rlmux import plugins
from rlmux.core.errors import PipelineError, UserError
from rlmux.rl.config import TrainingConfig
from rlmux.rl.conversations import check_reply
from rlmux.rl.demonstrations import demonstration_batch
from rlmux.rl.loading import call_and_await, call_each
from rlmux.rl.prompts.prompt_rounds import check_task
from rlmux.rl.tasks import Task, is_of_user, make_task
from rlmux.rl.tasks.file_rows import FileTask
from rlmux.rl.types import Prompt
from rlmux.rl.user_code.engine_check import check_engine
from rlmux.rl.user_code.reward_pool import check_processes, make_reward
from rlmux.rl.user_code.rewards import Response, RewardCall
from rlmux.rl.vocabulary import Vocabulary, load_vocabulary, opening_tokens_of, reply_tokens_of, stop_tokens_of

_ROWS_AT_ONCE = 1000
"""Rows whose tokens are counted together: a checkpoint's tokenizer is quicker with many texts."""

Placed = tuple[str, Prompt]
"""A prompt behind the place that a complaint names."""


def calls_user_code(config: TrainingConfig) -> bool:
    """Whether the checks of this pipeline run code that is not ours, or load what training alone needs."""
    task = config.task
    has_code = task.reward is not None or task.environment is not None or is_of_user(task.name)
    has_code = has_code or config.rollout.engine.is_of_user
    return has_code or config.model.path is not None


def complaint_about(config: TrainingConfig) -> str | None:
    """The first error in this pipeline's prompts, environment or reward."""
    try:
        for _ in checks(config):
            pass
    except UserError as error:
        return str(error)
    return None


def checks(config: TrainingConfig) -> Iterator[str]:
    """Check this pipeline's prompts, environment and reward. Raises UserError for the first error.

    Yields before every call of the user's code, which may hang in ways that no time limit ends, the key of `task` that
    names the code.
    """
    check_engine(config.rollout.engine, config.model)
    check_processes(config.task)
    vocabulary = load_vocabulary(config.model)
    if is_of_user(config.task.name):
        yield "name"
        _check_task(config, vocabulary)
        return
    task = make_task(config.task, seed=config.seed, vocabulary=vocabulary)
    check_task(config, task)
    stop_tokens_of(vocabulary, task.stop)
    _check_prompts(config, task, vocabulary)
    if config.task.environment is not None:
        yield from _environment_checks(config, task)
    if config.task.reward is not None:
        yield from _reward_checks(config, task)


def _check_task(config: TrainingConfig, vocabulary: Vocabulary) -> None:
    """The same for a task of the user's own, which may raise anything."""
    try:
        task = make_task(config.task, seed=config.seed, vocabulary=vocabulary)
        check_task(config, task)
        stop_tokens_of(vocabulary, task.stop)
        _check_prompts(config, task, vocabulary)
        prompt = task.prompt(0)
        score = task.score(prompt, prompt.answer or "")
    except UserError:
        raise
    except Exception as error:  # the user's task may raise anything
        raise UserError(f"task.name: {config.task.name} raised {plugins.described(error)}") from error
    if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
        raise UserError(f"task.name: {config.task.name}: its score of prompt 0 is {score!r}; accepted: a finite number")


def _check_prompts(config: TrainingConfig, task: Task, vocabulary: Vocabulary) -> None:
    """Raises UserError for the first prompt or answer that cannot be trained on."""
    for placed in _batches(config, task):
        at_most, key = config.rollout.max_prompt_tokens, "rollout.max_prompt_tokens"
        _check_lengths(placed, _prompt_counts(placed, vocabulary), "prompt", 1, at_most, key)
        if isinstance(task, FileTask) and config.sft_warmup.num_updates:
            _check_answers(config, placed, vocabulary)
    if config.sft_warmup.num_updates and not isinstance(task, FileTask):
        try:
            demonstration_batch(config, task, vocabulary, 0)
        except PipelineError as error:
            raise UserError(str(error)) from error


def _batches(config: TrainingConfig, task: Task) -> Iterator[list[Placed]]:
    if not isinstance(task, FileTask):
        prompts = range(config.algorithm.prompts_per_step)
        yield [(f"prompt {index} of task {config.task.name!r}", task.prompt(index)) for index in prompts]
        return
    for first in range(0, task.num_rows, _ROWS_AT_ONCE):
        rows = range(first, min(first + _ROWS_AT_ONCE, task.num_rows))
        yield [(task.place_of(row), task.prompt_of(row)) for row in rows]


def _check_answers(config: TrainingConfig, placed: Sequence[Placed], vocabulary: Vocabulary) -> None:
    """The answers that SFT warm-up shows. An end-of-sequence token follows each."""
    for place, prompt in placed:
        if prompt.answer is None:
            raise UserError(
                f"{place}: no {config.task.answer_key!r} to learn from; accepted: an answer in each row "
                "(task.answer_key), or sft_warmup.updates 0"
            )
    counts = _counts(placed, [prompt.answer or "" for _, prompt in placed], vocabulary)
    at_most, key = config.rollout.max_new_tokens - 1, "rollout.max_new_tokens, less the end of the sequence"
    _check_lengths(placed, counts, "answer", 0, at_most, key)


def _check_lengths(
    placed: Sequence[Placed], counts: Sequence[int], what: str, at_least: int, at_most: int, key: str
) -> None:
    for (place, _), count in zip(placed, counts, strict=True):
        if not at_least <= count <= at_most:
            raise UserError(f"{place}: the {what} has {count} tokens; accepted: {at_least} to {at_most} ({key})")


def _prompt_counts(placed: Sequence[Placed], vocabulary: Vocabulary) -> list[int]:
    """Tokens of each prompt, special tokens before it included."""
    counts = _counts(placed, [prompt.text for _, prompt in placed], vocabulary)
    for number, (place, prompt) in enumerate(placed):
        if prompt.messages is not None and vocabulary.has_control_names(prompt.messages):
            try:
                counts[number] = len(vocabulary.encode_chat(prompt.messages, prompt.text))
            except PipelineError as error:
                raise UserError(f"{place}: {error}") from error
    return [len(opening_tokens_of(vocabulary, prompt)) + n for (_, prompt), n in zip(placed, counts, strict=True)]


def _counts(placed: Sequence[Placed], texts: Sequence[str], vocabulary: Vocabulary) -> list[int]:
    """Tokens of each text. Raises UserError for the first that has none, with its place."""
    try:
        return vocabulary.count_tokens(texts)
    except PipelineError:
        return [_count(vocabulary, text, place) for (place, _), text in zip(placed, texts, strict=True)]


def _count(vocabulary: Vocabulary, text: str, place: str) -> int:
    try:
        (count,) = vocabulary.count_tokens([text])
    except PipelineError as error:
        raise UserError(f"{place}: {error}") from error
    return count


def _environment_checks(config: TrainingConfig, task: Task) -> Iterator[str]:
    """Import the user's environment class, make one for prompt 0, and send it that prompt's answer as first turn."""
    limit_s, prompt = config.task.reward_timeout_s, task.prompt(0)
    name = f"environment {config.task.environment} on a sample"
    try:
        yield "environment"
        (environment,) = call_each([(name, partial(task.environment, prompt))], limit_s)
        assert environment is not None
        yield "environment"
        (reply,) = call_and_await([(name, partial(environment.reply, prompt.answer or ""))], limit_s)
        check_reply(reply, name)
        reply_tokens_of(load_vocabulary(config.model), prompt, reply or "a")
    except PipelineError as error:
        raise UserError(f"task.environment: {error}") from error


def _reward_checks(config: TrainingConfig, task: Task) -> Iterator[str]:
    """Import the user's reward function and call it on prompt 0 with its answer as the response, in a process of its
    own where the run will."""
    prompt = task.prompt(0)
    checked = replace(config.task, num_reward_processes=min(1, config.task.num_reward_processes))
    try:
        yield "reward"
        (reward,) = call_each(
            [(f"importing {config.task.reward}", partial(make_reward, task, checked, config.num_steps))],
            config.task.reward_timeout_s,
        )
        responses = [_sample_response(config, prompt)] * (config.algorithm.group_size if reward.is_grouped else 1)
        yield "reward"
        call = RewardCall(prompt=prompt, responses=responses, step=1, places=["on a sample"] * len(responses))
        (outcome,) = reward.outcomes([call])
        if isinstance(outcome, PipelineError):
            raise outcome
    except PipelineError as error:
        raise UserError(f"task.reward: {error}") from error


def _sample_response(config: TrainingConfig, prompt: Prompt) -> Response:
    """The prompt's answer, as if a model had given it; without tokens where the vocabulary cannot write it."""
    text = prompt.answer or ""
    try:
        token_ids = load_vocabulary(config.model).encode(text)
    except PipelineError:
        token_ids = ()
    return Response(text=text, token_ids=token_ids, turns=((True, text),))
