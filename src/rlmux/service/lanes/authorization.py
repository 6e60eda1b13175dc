"""What a user may submit: pipelines of its own, of its projects, and code only where the user may run some."""

from __future__ import annotations

from rlmux.config.load import Spec
from rlmux.rl.config import ENGINES, TrainingConfig
from rlmux.service.dashboard.auth.access import Who
from rlmux.service.dashboard.problems import ProblemError


def check_rights(spec: Spec, who: Who | None) -> None:
    """Raises ProblemError for the first pipeline that the caller may not submit."""
    if who is None or who.may("admin"):
        return
    for one in spec.pipelines:
        name, of = one.name, one.pipeline
        if of.user != who.user:
            why = f"pipeline {name!r} is not said to be of user {who.user!r}"
            raise ProblemError(403, why, where="text", accepted=f"user: {who.user}")
        if who.is_limited and of.project and of.project not in who.projects:
            raise ProblemError(
                403,
                f"pipeline {name!r} is of project {of.project!r}, which {who.user!r} is not in",
                where="text",
                accepted=", ".join(sorted(who.projects)) or "no project",
            )
        code = _code_of(one.config)
        if code is not None:
            check_may_run_code(who, f"pipeline {name!r} with {code}")


def check_may_run_code(who: Who | None, what: str) -> None:
    """Raises ProblemError where the caller may not run code on the server's machine."""
    if who is not None and not who.may_run_code:
        raise ProblemError(403, f"{what} runs code, which {who.user!r} may not", accepted="built-in tasks and rewards")


def _code_of(config: TrainingConfig) -> str | None:
    """The first key of a pipeline that names code to run on the server's machine; None where none does."""
    task, engine = config.task, config.rollout.engine
    is_own_task = ":" in task.name and not task.name.startswith("reasoning-gym:")
    named = {
        "task.name": is_own_task,
        "task.reward": task.reward is not None,
        "task.environment": task.environment is not None,
        "rollout.engine.name": engine.name not in ENGINES,
        "rollout.engine.python": engine.python is not None,
    }
    return next((key for key, is_named in named.items() if is_named), None)
