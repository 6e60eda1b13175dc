"""What a user may submit: pipelines of its own, of its projects, and code only where the user may run some."""

from __future__ import annotations

import json

from rlmux.config.load import Spec
from rlmux.rl.config import ENGINES, TrainingConfig
from rlmux.service.dashboard.auth.access import Principal
from rlmux.service.problems import ProblemError


def check_rights(spec: Spec, principal: Principal | None) -> None:
    """Raises ProblemError for the first pipeline that the caller may not submit."""
    if principal is None or principal.may("admin"):
        return
    for pipeline in spec.pipelines:
        name, of = pipeline.name, pipeline.pipeline
        if of.user != principal.user:
            why = f"pipeline {name!r} is of user {of.user!r}, and the caller is {principal.user!r}"
            raise ProblemError(403, why, where="text", accepted=f"user: {principal.user}, or no key user")
        if principal.is_limited and of.project and of.project not in principal.projects:
            raise ProblemError(
                403,
                f"pipeline {name!r} is of project {of.project!r}, which {principal.user!r} is not in",
                where="text",
                accepted=", ".join(sorted(principal.projects)) or "no project",
            )
        code = _code_of(pipeline.config)
        if code is not None:
            check_may_run_code(principal, f"pipeline {name!r} with {code}")


def own_user(spec: Spec, principal: Principal | None) -> list[str]:
    """Overrides that make pipelines without a user the caller's; none for an administrator, who submits for anyone."""
    if principal is None or principal.may("admin"):
        return []
    return [
        f"pipelines.{pipeline.name}.user={json.dumps(principal.user)}"
        for pipeline in spec.pipelines
        if not pipeline.pipeline.user
    ]


def check_may_run_code(principal: Principal | None, what: str) -> None:
    """Raises ProblemError where the caller may not run code on the server's machine."""
    if principal is not None and not principal.may_run_code:
        raise ProblemError(
            403, f"{what} runs code, which {principal.user!r} may not", accepted="built-in tasks and rewards"
        )


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
