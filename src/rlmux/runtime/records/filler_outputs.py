"""A filler's answers: `NAME/answers.jsonl`, a line for each trajectory, step after step.

    env worker ── finish_step ─▶ the step's lines, on disk ─▶ the step is over
    a resumed run ── answered_steps ─▶ the last complete step: the run continues after it

Lines are in the order of their ids and hold nothing that depends on what ran beside: the file has the same bytes
whatever the filler shared its devices with.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rlmux.core.errors import StorageError
from rlmux.rl.config import TrainingConfig
from rlmux.rl.types import TrainingBatch
from rlmux.rl.vocabulary import Vocabulary

ANSWERS_NAME = "answers.jsonl"


class AnswerFile:
    """The one writer of the file."""

    def __init__(self, path: Path, vocabulary: Vocabulary) -> None:
        self._path = path
        self._vocabulary = vocabulary
        self._end: tuple[int, int] | None = None
        """Last written step and the end of its lines, in bytes; None before the first."""

    def write(self, batch: TrainingBatch) -> None:
        """Write the step's lines behind those of earlier steps, in place of any that are there. Raises StorageError."""
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in self._lines(batch))
        try:
            if self._end is None or self._end[0] >= batch.step:
                self._end = (batch.step - 1, _end_before(self._path, batch.step))
            with open(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600), "r+b") as file:
                file.truncate(self._end[1])
                file.seek(self._end[1])
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
                self._end = (batch.step, file.tell())
        except OSError as error:
            raise StorageError(f"{self._path}: {error.strerror or error}") from error

    def _lines(self, batch: TrainingBatch) -> Iterator[dict[str, object]]:
        for trajectory in batch.trajectories:
            yield {
                "step": batch.step,
                "prompt": trajectory.id.prompt,
                "sample": trajectory.id.sample,
                "text": self._vocabulary.decode(trajectory.prompt_tokens),
                "answer": self._vocabulary.decode(trajectory.tokens),
                "reward": trajectory.reward,
                "stop": trajectory.stop_reason,
                "tokens": len(trajectory.tokens),
                "logprob": sum(trajectory.logprobs),
            }


def answered_steps(folder: Path, config: TrainingConfig) -> int:
    """Last step that a filler need not repeat; 0 for none. A filler that is not over repeats its last step."""
    num_lines = config.algorithm.prompts_per_step * config.algorithm.group_size
    num_by_step: dict[int, int] = {}
    for step, _ in _steps(folder / ANSWERS_NAME):
        num_by_step[step] = num_by_step.get(step, 0) + 1
    last = 0
    while num_by_step.get(last + 1) == num_lines:
        last += 1
    return min(last, config.num_steps - 1)


def _end_before(path: Path, step: int) -> int:
    """End of the lines of earlier steps, in bytes."""
    end = 0
    for found, line_end in _steps(path):
        if found >= step:
            break
        end = line_end
    return end


def _steps(path: Path) -> Iterator[tuple[int, int]]:
    """Step and end of each whole line, up to the first that is not one."""
    end = 0
    with suppress(FileNotFoundError, ValueError, KeyError, TypeError), path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            end += len(line)
            yield int(json.loads(line)["step"]), end
