"""Trajectories as text, written beside the run by a thread of the env worker: training never waits for it.

    finish_step ──▶ batch ──keep──▶ queue of two ──thread──▶ decode ──▶ samples.db

Steps that cannot be written, because the disk is full or too slow, are reported in `workers.log`.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import chain, groupby, islice
from pathlib import Path

from rlmux.report.samples import KeptSample, SampledToken, SampleWriter, SpecialTexts
from rlmux.rl.agents.outcomes import ENDED
from rlmux.rl.episode import parts_of
from rlmux.rl.types import TrainingBatch, Trajectory
from rlmux.rl.vocabulary import Vocabulary

_Part = tuple[bool, tuple[int, ...]]
"""A turn or a reply: whether the model made it, and its tokens."""
_MAX_WAITING = 2
"""Steps that may wait to be written."""


class SampleKeeper:
    """The executor's thread is joined when the process ends: the last step is kept too."""

    def __init__(self, path: Path, vocabulary: Vocabulary) -> None:
        self._path = path
        self._vocabulary = vocabulary
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="samples")
        self._texts: dict[int, tuple[str, str]] = {}
        """Cache of token texts, without special tokens and with them."""
        self._is_room = threading.BoundedSemaphore(_MAX_WAITING)

    def keep(self, batch: TrainingBatch) -> None:
        """Returns at once."""
        if self._is_room.acquire(blocking=False):
            self._thread.submit(self._keep, batch)
        else:
            _warn(batch.step, "steps come faster than they can be written")

    def close(self) -> None:
        """Waits for what is being written."""
        self._thread.shutdown()

    def _keep(self, batch: TrainingBatch) -> None:
        try:
            with closing(SampleWriter(self._path)) as writer:  # closed, SQLite's log beside it is folded in and gone
                writer.add(batch.step, self._samples(batch))
        except (sqlite3.Error, OSError, ValueError) as error:
            _warn(batch.step, str(error))
        finally:
            self._is_room.release()

    def _samples(self, batch: TrainingBatch) -> Iterator[KeptSample]:
        groups = dict.fromkeys(trajectory.id[:2] for trajectory in batch.trajectories)
        is_mixed = len({step for step, _ in groups}) > 1  # then prompts of several steps have the same place
        number_of = {group: number if is_mixed else group[1] for number, group in enumerate(groups)}
        for trajectory, advantage in zip(batch.trajectories, batch.advantages, strict=True):
            sequences = trajectory.sequences
            parts = [self._parts(sequence) for sequence in sequences]
            versions = [version for sequence in sequences for version in sequence.versions]
            yield KeptSample(
                prompt=number_of[trajectory.id[:2]],
                sample=trajectory.id.sample,
                prompt_text=self._vocabulary.decode(trajectory.prompt_tokens),
                turns=self._turns(trajectory, parts, self._vocabulary.decode),
                tokens_by_turn=[turn for pair in zip(sequences, parts, strict=True) for turn in self._tokens(*pair)],
                special=self._special(trajectory, parts),
                reward=trajectory.reward,
                advantage=advantage,
                stop=trajectory.stop_reason,
                tokens=sum(len(sequence.tokens) for sequence in sequences),
                num_turns=sum(sequence.num_turns for sequence in sequences),
                first_version=min(versions, default=0),
                last_version=max(versions, default=0),
            )

    def _turns(
        self, trajectory: Trajectory, parts: Sequence[Sequence[_Part]], decode: Callable[[Sequence[int]], str]
    ) -> list[tuple[bool, str]]:
        """Turns and replies in order, each branch behind its prompt; last how it ended, if not by itself."""
        turns = [(is_sampled, decode(tokens)) for is_sampled, tokens in parts[0]]
        for branch, its_parts in zip(trajectory.branches, parts[1:], strict=True):
            turns.append((False, f"(another chat)\n{decode(branch.prompt_tokens)}"))
            turns += [(is_sampled, decode(tokens)) for is_sampled, tokens in its_parts]
        if trajectory.outcome not in (None, ENDED):
            turns.append((False, f"({trajectory.outcome})"))
        return turns

    def _parts(self, trajectory: Trajectory) -> list[_Part]:
        """The turns and replies; empty replies are looked for only where turns have no reply between them."""
        runs = sum(is_sampled for is_sampled, _ in groupby(trajectory.is_sampled))
        stop_tokens = self._vocabulary.stop_tokens if trajectory.num_turns > runs else ()
        return parts_of(trajectory.tokens, trajectory.is_sampled, stop_tokens)

    def _tokens(self, trajectory: Trajectory, parts: Sequence[_Part]) -> list[list[SampledToken]]:
        """Tokens of each turn of the model."""
        per_token = zip(trajectory.tokens, trajectory.logprobs, trajectory.versions, strict=True)
        parted = [(is_sampled, list(islice(per_token, len(tokens)))) for is_sampled, tokens in parts]
        return [
            [SampledToken(self._texts_of(token)[0], logprob, version) for token, logprob, version in part]
            for is_sampled, part in parted
            if is_sampled
        ]

    def _special(self, trajectory: Trajectory, parts: Sequence[Sequence[_Part]]) -> SpecialTexts:
        decode = partial(self._vocabulary.decode, special_tokens=True)
        sampled = [tokens for is_sampled, tokens in chain.from_iterable(parts) if is_sampled]
        texts = [[self._texts_of(token) for token in tokens] for tokens in sampled]
        return SpecialTexts(
            prompt_text=decode(trajectory.prompt_tokens),
            turns=[text for _, text in self._turns(trajectory, parts, decode)],
            names_by_turn=[{place: name for place, (text, name) in enumerate(turn) if name != text} for turn in texts],
        )

    def _texts_of(self, token: int) -> tuple[str, str]:
        if token not in self._texts:
            decode = self._vocabulary.decode
            self._texts[token] = decode([token]), decode([token], special_tokens=True)
        return self._texts[token]


def _warn(step: int, reason: str) -> None:
    print(f"trajectories of step {step} were not kept: {reason}", flush=True)
