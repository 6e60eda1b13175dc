"""User files that a pipeline reads, and whether they changed before a resume.

    a pipeline comes to a run    ──▶ note `inputs`: sha256 by path
    it resumes later             ──▶ note `inputs` again if files differ: `changed` names each

A resumed pipeline trains on the present files: its weights equal those of an uninterrupted run only if no file changed.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlmux.core.errors import UserError
from rlmux.core.model import PipelineId, PipelineStatus
from rlmux.log.notes import InputsNote
from rlmux.log.run_state import RunState
from rlmux.rl.config import TrainingConfig
from rlmux.runtime.backend import Submission

_MAX_HASHED_BYTES = 1 << 28
"""Size of the largest file that is read; of a larger one, size and time of change are compared."""


def input_files(config: TrainingConfig, code_folder: Path) -> list[Path]:
    """The pipeline's rows, modules of its reward and environment as far as in `code_folder`, and its model's files."""
    files: set[Path] = set()
    if config.task.path is not None:
        files.add(Path(config.task.path))
    for reference in filter(None, (config.task.reward, config.task.environment)):
        _add_module(reference.partition(":")[0], code_folder, files)
    if config.model.path is not None:
        files.update(path for path in Path(config.model.path).glob("*") if path.is_file())
    return sorted(files)


def _add_module(name: str, folder: Path, files: set[Path]) -> None:
    """Add a module's file, and those of the modules of the same folder that it imports."""
    stem = folder.joinpath(*name.split("."))
    for path in (stem.with_suffix(".py"), stem / "__init__.py"):
        if path.is_file() and path not in files:
            files.add(path)
            for imported in _imports_of(path):
                _add_module(imported, folder, files)


def _imports_of(path: Path) -> list[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def input_notes(submissions: Sequence[Submission]) -> list[InputsNote]:
    """Notes of pipelines that join a run."""
    return [InputsNote(pipeline=new.pipeline.id, files=_fingerprints(new.inputs)) for new in submissions if new.inputs]


def changed_input_notes(submissions: Sequence[Submission], state: RunState) -> list[InputsNote]:
    """Notes of resumed pipelines whose files differ from their last note."""
    notes = []
    for submission in submissions:
        before, now = state.inputs.get(submission.pipeline.id, {}), _fingerprints(submission.inputs)
        if before != now:
            changed = tuple(_differences(before, now)) if before else ()
            notes.append(InputsNote(pipeline=submission.pipeline.id, files=now, changed=changed))
    return notes


def retried(names: Sequence[str], state: RunState, given: Sequence[PipelineId]) -> list[PipelineId]:
    """Pipelines of these names. Raises UserError, with the failed pipelines as `given`, for one that has not failed."""
    failed = [name for name in given if name in state.ended and state.ended[name].status == PipelineStatus.FAILED]
    accepted = f"accepted: a pipeline that failed: {', '.join(failed)}" if failed else "no pipeline of this run failed"
    for name in names:
        if name not in given:
            raise UserError(f"--retry {name}: no such pipeline in this run; {accepted}")
        if name not in failed:
            status = state.ended[name].status if name in state.ended else "not over, and goes on without it"
            raise UserError(f"--retry {name}: it is {status}; {accepted}")
        if "all" in state.removals.get(name, ()):
            raise UserError(f"--retry {name}: it is removed; {accepted}")
    return [PipelineId(name) for name in dict.fromkeys(names)]


def _fingerprints(files: Sequence[Path]) -> dict[str, str]:
    return {str(path): _fingerprint(path) for path in files if path.is_file()}


def _fingerprint(path: Path) -> str:
    stat = path.stat()
    if stat.st_size > _MAX_HASHED_BYTES:
        return f"{stat.st_size} bytes of {stat.st_mtime_ns}"
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """A few words for each file that differs."""
    words = []
    for path in sorted({*before, *now}):
        if path not in now:
            words.append(f"{path} is gone")
        elif path not in before:
            words.append(f"{path} is new")
        elif before[path] != now[path]:
            words.append(f"{path} has changed")
    return words
