"""Trajectories as text, written beside the run by a thread of the env worker: training never waits for it.

    finish_step ──▶ batch ──keep──▶ queue of two ──thread──▶ decode ──▶ samples.db

Steps that cannot be written, because the disk is full or too slow, are reported in `workers.log`.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import groupby
from pathlib import Path

from rlmux.report.samples import KeptSample, SampledToken, SampleWriter
from rlmux.rl.types import TrainingBatch, Trajectory
from rlmux.rl.vocabulary import Vocabulary

_MAX_WAITING = 2
"""Steps that may wait to be written."""


class SampleKeeper:
    """The executor's thread is joined when the process ends: the last step is kept too."""

    def __init__(self, path: Path, vocabulary: Vocabulary) -> None:
        self._path = path
        self._vocabulary = vocabulary
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="samples")
        self._texts: dict[int, str] = {}
        """Cache of token texts."""
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
            yield KeptSample(
                prompt=number_of[trajectory.id[:2]],
                sample=trajectory.id.sample,
                prompt_text=self._vocabulary.decode(trajectory.prompt_tokens),
                turns=self._turns(trajectory),
                tokens_by_turn=self._tokens(trajectory),
                reward=trajectory.reward,
                advantage=advantage,
                stop=trajectory.stop_reason,
                tokens=len(trajectory.tokens),
                num_turns=trajectory.num_turns,
                first_version=min(trajectory.versions, default=0),
                last_version=max(trajectory.versions, default=0),
            )

    def _turns(self, trajectory: Trajectory) -> list[tuple[bool, str]]:
        marked = zip(trajectory.tokens, trajectory.is_sampled, strict=True)
        return [
            (is_sampled, self._vocabulary.decode([token for token, _ in part]))
            for is_sampled, part in groupby(marked, key=lambda pair: pair[1])
        ]

    def _tokens(self, trajectory: Trajectory) -> list[list[SampledToken]]:
        """Tokens of each turn of the model."""
        per_token = zip(trajectory.is_sampled, trajectory.tokens, trajectory.logprobs, trajectory.versions, strict=True)
        return [
            [SampledToken(self._text_of(token), logprob, version) for _, token, logprob, version in part]
            for is_sampled, part in groupby(per_token, key=lambda one: one[0])
            if is_sampled
        ]

    def _text_of(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self._vocabulary.decode([token])
        return self._texts[token]


def _warn(step: int, reason: str) -> None:
    print(f"trajectories of step {step} were not kept: {reason}", flush=True)
