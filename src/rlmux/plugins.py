"""Parts that users add without changing rlmux: policies, tasks, rollout engines and workloads of their own.

    module:name, in the file or on the command line ───────┐
    a bare name: the entry point of an installed package ──┴▶ find(kind, text) ─▶ the class or function

    kind        entry points      what it is
    policy      rlmux.policies    a frozen dataclass as in `core/decision/policy.py`
    task        rlmux.tasks       a class made from (params, seed), as in `rl/tasks/base.py`
    engine      rlmux.engines     a function or class that makes a `RolloutEngine` (`engines/user_engine.py`)
    workload    rlmux.workloads   a function of `seed` and of parameters with default values that returns a Workload

Built-in names come first: no plug-in can take one. Each is imported at its first use by name.
"""

from __future__ import annotations

import importlib
import re
import sys
import sysconfig
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal

from rlmux.core.errors import UserError

Kind = Literal["policy", "task", "engine", "workload"]

GROUPS: dict[Kind, str] = {
    "policy": "rlmux.policies",
    "task": "rlmux.tasks",
    "engine": "rlmux.engines",
    "workload": "rlmux.workloads",
}
"""Entry point group of each kind."""


_STANDARD_LIBRARY = frozenset(
    entry
    for name in ("stdlib", "platstdlib")
    for entry in (sysconfig.get_path(name), f"{sysconfig.get_path(name)}/lib-dynload")
)


def is_reference(text: str) -> bool:
    """Whether this is `module:name`, both of them Python names."""
    return re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", text) is not None


def names(kind: Kind) -> tuple[str, ...]:
    """Names that installed packages add, sorted."""
    return tuple(sorted({each.name for each in entry_points(group=GROUPS[kind])}))


def is_plugin(kind: Kind, text: str) -> bool:
    """Whether a plug-in may answer to this: `module:name`, or the name of an entry point. Nothing is imported."""
    return is_reference(text) or text in names(kind)


def look_in(folder: Path, *, is_late: bool = False, is_first: bool = False) -> None:
    """Let references find the modules of this folder; workers that are started later find them too.

    It comes behind Python's own modules, so that a user's `types.py` is not what others import. `is_late`: it goes
    behind all others, so that a pipeline submitted later changes nothing for earlier ones. `is_first`: it goes before
    all but Python's own, also where it is there.
    """
    text = str(folder)
    if text in sys.path and not is_first:
        return
    others = [entry for entry in sys.path if entry != text]
    own = [entry for entry in others if entry in _STANDARD_LIBRARY]
    installed = [entry for entry in others if entry not in _STANDARD_LIBRARY]
    sys.path[:] = [*others, text] if is_late else [*own, text, *installed]
    importlib.invalidate_caches()


def find(kind: Kind, text: str, built_in: Sequence[str]) -> Callable[..., Any]:
    """What a plug-in offers under this text. Raises UserError, with what is accepted, where there is none."""
    for each in entry_points(group=GROUPS[kind]):
        if each.name == text:
            return _callable(kind, text, each)
    if is_reference(text):
        return _callable(kind, text, EntryPoint(name=text, value=text, group=GROUPS[kind]))
    known = [*built_in, *names(kind)]
    near = get_close_matches(text, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UserError(f"{kind} {text!r} is unknown; accepted: {', '.join(known)}, or module:name of your own{hint}")


def _callable(kind: Kind, text: str, point: EntryPoint) -> Callable[..., Any]:
    try:
        found = point.load()
    except ModuleNotFoundError as error:
        if error.name is not None and f"{point.module}.".startswith(f"{error.name}."):
            raise UserError(
                f"{kind} {text!r}: no module {error.name!r}; accepted: one beside the file, in the working folder or "
                "installed"
            ) from None
        raise UserError(f"{kind} {text!r} imports {error.name!r}, which is not installed") from error
    except AttributeError:
        have = [name for name, value in vars(sys.modules[point.module]).items() if _is_own(value, point.module)]
        raise UserError(
            f"{kind} {text!r}: {point.module!r} has no {point.attr!r}; it has: {', '.join(have) or 'none'}"
        ) from None
    except Exception as error:  # the user's module may raise anything
        raise UserError(f"{kind} {text!r}: importing {point.module!r} raised {described(error)}") from error
    if not callable(found):
        raise UserError(f"{kind} {text!r} is {found!r}; accepted: a class or a function")
    return found  # type: ignore[no-any-return]


def _is_own(value: Any, module: str) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module


def described(error: BaseException) -> str:
    """An error of the user's code in one line, with the place that raised it."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    where = "" if place is None else f" ({Path(place.tb_frame.f_code.co_filename).name}, line {place.tb_lineno})"
    return f"{type(error).__name__}: {error}{where}"
