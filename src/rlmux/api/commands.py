"""load, plan, simulate, check, run, compare, verify: what the commands of these names do.

file ─▶ load ─▶ Spec ─┬▶ plan, simulate    dictionaries, the keys of `--json`
                      └▶ run, compare      real training; a Run, a dictionary
                         check             the first half of `run`
folder of a run ─▶ verify                  training of some of its steps again; a dictionary
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from rlmux.api.files import File, OnWarning, PlanBy, load_file, load_workload, look_for_plugin, policy_and_costs, warn
from rlmux.api.run_handle import Display, Run, followed
from rlmux.config import Purpose, Spec
from rlmux.core.errors import UserError
from rlmux.policies import check_policy, split_name, with_ablations

if TYPE_CHECKING:
    from rlmux.core.decision.policy import Policy
    from rlmux.runtime.controller import Listener
    from rlmux.runtime.launch import AddCosts
    from rlmux.runtime.run import RunOptions, RunResult
    from rlmux.sim.workloads.arrivals import Workload

Progress = Callable[[int, int], None]
"""Called with (simulations done, simulations in all)."""


def load(
    file: File,
    *,
    overrides: Sequence[str] = (),
    policy: str | None = None,
    purpose: Literal["run", "plan"] = "run",
) -> Spec:
    """Read and check a file: all that training needs (`run`), or all that planning and simulating needs (`plan`).

    `overrides`: as `--set`, such as "pipelines.*.steps=10". Raises UserError for what is wrong with it.
    """
    if purpose not in ("run", "plan"):
        raise UserError(f"purpose is {purpose!r}; accepted: run, plan")
    return load_file(file, purpose=Purpose(purpose), overrides=overrides, policy=policy)


def plan(
    file: File,
    *,
    policy: str | None = None,
    overrides: Sequence[str] = (),
    profile: str | Path | None = None,
    run: str | Path | None = None,
    gpu: str | None = None,
    answer_tokens: float | None = None,
) -> dict[str, Any]:
    """Where every pipeline would go, its step slowdown and dollars for an hour; starts nothing.

    `profile`: file of `rlmux profile` with the estimates of pipelines that have none. `run`: folder of a run that
    measured them. `gpu`: GPU of pools without one, by default this machine's. `answer_tokens`: mean of an answer,
    where it is known.
    The keys are as in `rlmux plan --json` (docs/how-it-works/simulator.md).
    """
    from rlmux.sim import api
    from rlmux.sim.workloads.spec_file import workload_of

    spec = load_file(
        file,
        purpose=Purpose.PLAN,
        overrides=overrides,
        policy=policy,
        profile=profile,
        plan_by=PlanBy(run=run, gpu=gpu, answer_tokens=answer_tokens),
    )
    return api.plan(workload_of(spec), policy=spec.policy)


def simulate(
    workload: File | Workload,
    *,
    policies: Sequence[str] = ("solo", "rollmux", "rlmux"),
    ablate: Sequence[str] = (),
    seeds: int = 1,
    overrides: Sequence[str] = (),
    profile: str | Path | None = None,
    progress: Progress | None = None,
    processes: int | None = None,
    out: str | Path | None = None,
) -> dict[str, Any]:
    """Figures of every policy on a file's pipelines, or on a workload by name, such as "weave".

    `ablate`: mechanisms, or "all"; each policy that has them is also simulated without them (`with_worth`).
    `seeds`: workloads of seeds 0 to seeds - 1; figures are means with min and max. `processes`: by default one a core.
    `out`: a folder for pictures. `profile`: as for `plan`.
    The keys are as in `rlmux simulate --json` (docs/how-it-works/simulator.md).
    """
    from rlmux.sim import api

    for name in policies:
        check_policy(name)
        look_for_plugin(name, Path.cwd())
    return with_worth(
        api.simulate(
            load_workload(workload, overrides, profile=profile),
            policies=with_ablations(policies, ablate),
            num_seeds=seeds,
            progress=progress,
            num_processes=processes,
            out=None if out is None else Path(out),
        )
    )


def check(
    file: File, *, policy: str | None = None, overrides: Sequence[str] = (), on_warning: OnWarning = warn
) -> Spec:
    """The file, with all checked that `run` checks before it starts on this machine, its memory included.

    Starts no worker: a `promise` is not probed. Raises UserError; the further mistakes that are known are its notes.
    """
    from rlmux.runtime import launch
    from rlmux.runtime.run import fitted

    spec, _, add_costs = _ready(file, policy=policy, overrides=overrides, on_warning=on_warning)
    fitted(spec.cluster, launch.submissions(spec, add_costs))
    return spec


def run(
    file: File,
    *,
    policy: str | None = None,
    overrides: Sequence[str] = (),
    out: str | Path | None = None,
    overwrite: bool = False,
    backend: Literal["local", "ray"] = "local",
    address: str | None = None,
    profile: str | Path | None = None,
    keep_open: bool = False,
    listeners: Sequence[Listener] = (),
    display: Display | None = None,
    on_warning: OnWarning = warn,
) -> Run:
    """Train the file's pipelines, and return when all are over or the run is stopped (see `Run.is_over`).

    `out`: the run's folder, by default a new one under runs/. `backend`, `address`, `profile`, `keep_open`: as
    `rlmux run` has them.
    `listeners`: receive every event (`runtime/controller.py`); `display`: makes one from the checked file.
    In the main thread Ctrl-C and SIGTERM stop the run at the next safe point; it goes on with `Run.resume`.
    `on_warning`: receives pools without a price and unusable parts of the profile; by default the logger `rlmux`.
    Raises UserError before anything starts. A pipeline's own failure is in `Run.summary`, not raised.
    """
    from rlmux.runtime.records import folders
    from rlmux.runtime.run import RunOptions

    spec, decides, add_costs = _ready(
        file,
        backend=backend,
        policy=policy,
        overrides=overrides,
        may_be_empty=keep_open,
        profile=profile,
        on_warning=on_warning,
    )
    with (
        folders.chosen(out, f"{_stem(file)}-{spec.policy}") as folder,
        followed(spec, listeners, display) as listening,
    ):
        options = RunOptions(backend=backend, listeners=listening, is_kept_open=keep_open)
        result = _train(
            spec, folder, options, policy=decides, add_costs=add_costs, address=address, is_overwriting=overwrite
        )
    ended = Run(folder)
    ended.result = result
    return ended


def compare(
    file: File,
    *,
    policies: Sequence[str] = ("solo", "colocated", "rollmux"),
    ablate: Sequence[str] = (),
    overrides: Sequence[str] = (),
    rounds: int = 1,
    out: str | Path | None = None,
    overwrite: bool = False,
    backend: Literal["local", "ray"] = "local",
    address: str | None = None,
    profile: str | Path | None = None,
    display: Display | None = None,
    on_warning: OnWarning = warn,
) -> dict[str, Any]:
    """Train the same pipelines under each policy, one after another; ratios are to the first.

    `rounds`: how often, 1 or more, the policies in turn; figures are medians then, ratios are taken within a round.

    `profile`, `display`, `on_warning`: as for `run`, under each policy anew. `ablate`: as for `simulate`.
    The keys are as in `rlmux compare --json`. Raises KeyboardInterrupt where a run is stopped.
    """
    from rlmux.runtime.checks import run_comparison
    from rlmux.runtime.records import folders
    from rlmux.runtime.run import RunOptions

    for name in policies:
        check_policy(name)
    if rounds < 1:
        raise UserError(f"rounds: {rounds}; accepted: 1 or more")
    names = with_ablations(policies, ablate)
    spec = _loaded_to_train(file, backend, overrides=overrides, profile=profile, on_warning=on_warning)
    policy_and_costs(spec, profile, on_warning=lambda _: None)  # a profile of something else is refused before a folder

    def start(spec: Spec, into: Path) -> RunResult:
        with followed(spec, (), display) as listening:
            options = RunOptions(backend=backend, listeners=listening)
            policy, add_costs = policy_and_costs(spec, profile, on_warning)
            return _train(spec, into, options, policy=policy, add_costs=add_costs, address=address)

    with folders.chosen(out, f"{_stem(file)}-compare") as folder:
        table = run_comparison.run_each(spec, names, folder, start, num_rounds=rounds, is_overwriting=overwrite)
        return with_worth(table)


def verify(folder: str | Path, names: Sequence[str] = (), *, all_steps: bool = False, seed: int = 0) -> dict[str, Any]:
    """Train steps of a finished run's pipelines again, each pipeline alone, and compare weights with the log.

    `names`: pipelines, by default all. `all_steps`: every step, from the first; otherwise about 1 in 20, drawn with
    `seed`, from the initial weights and the checkpoints that the run kept.
    The keys are as in `rlmux verify --json` (docs/reference/cli.md). Raises UserError, before anything starts, for a
    folder without a run, a run in progress, an unknown name, and a lane that its server runs.
    """
    from rlmux.runtime.checks import replay_verification
    from rlmux.runtime.records import folders

    folders.check_run(Path(folder))
    if folders.is_hosted(Path(folder)):
        raise UserError(f"{folder}: a lane that its server runs; accepted: rlmux verify {folder}")
    verdicts = replay_verification.verify(
        Path(folder), names, print_line=lambda _: None, sample_seed=None if all_steps else seed
    )
    return replay_verification.result_of(verdicts)


def with_worth(result: Mapping[str, Any]) -> dict[str, Any]:
    """A result with `policies`, and what mechanisms are worth where policies ran with and without them.

        {..., "ablations": {policy: {"tails": {"policy", "figure", "with", "without", "ratio"}, "tails,fill": ...}}}

    `figure`: a key of both rows, `cost_usd_per_solo_hour` where nodes are paid, else `makespan_s`; `ratio`: without
    over with, above 1 if the mechanisms help; `ratios`: of each round, where policies ran in several.
    """
    rows, ablations = result["policies"], dict[str, dict[str, Any]]()
    for name in rows:
        policy, off = split_name(name)
        if off and policy in rows:
            worth = {"policy": name, **_worth(rows[policy], rows[name])}
            ablations.setdefault(policy, {})[",".join(off)] = worth
    return {**result, "ablations": ablations} if ablations else dict(result)


def _worth(kept: Mapping[str, Any], ablated: Mapping[str, Any]) -> dict[str, Any]:
    usd = "cost_usd_per_solo_hour"  # for the same dollars, a slower policy does less before pipelines depart
    figure = usd if kept.get(usd) and ablated.get(usd) else "makespan_s"
    above, below = ablated[figure], kept[figure]
    ratio = above / below if above is not None and below else None
    pairs = list(zip(ablated.get("makespans_s", ()), kept.get("makespans_s", ()), strict=True))
    if len(pairs) > 1 and all(kept_s for _, kept_s in pairs):
        ratios = sorted(ablated_s / kept_s for ablated_s, kept_s in pairs)
        return {"figure": figure, "with": below, "without": above, "ratio": median(ratios), "ratios": ratios}
    return {"figure": figure, "with": below, "without": above, "ratio": ratio}


def _stem(file: File) -> str:
    """What a run's folder is named after."""
    return Path(file).stem if isinstance(file, str | Path) else "run"


def _ready(
    file: File, *, backend: str = "local", profile: str | Path | None = None, on_warning: OnWarning, **how: Any
) -> tuple[Spec, Policy, AddCosts]:
    """The file, checked for training, and what a run of it starts with. `how`: as `load_file` takes it."""
    spec = _loaded_to_train(file, backend, profile=profile, on_warning=on_warning, **how)
    return spec, *policy_and_costs(spec, profile, on_warning)


def _loaded_to_train(file: File, backend: str, *, on_warning: OnWarning, **how: Any) -> Spec:
    """Raises UserError where training's packages are not installed, too."""
    from rlmux.runtime import launch
    from rlmux.runtime.local import notes_of_devices

    launch.check_installed()
    spec = load_file(file, purpose=Purpose.RUN, on_warning=on_warning, **how)
    for note in notes_of_devices(spec.cluster) if backend == "local" else ():
        on_warning(note)
    return spec


def _train(
    spec: Spec,
    folder: Path,
    options: RunOptions,
    *,
    policy: Policy,
    add_costs: AddCosts,
    address: str | None,
    is_overwriting: bool = False,
) -> RunResult:
    from rlmux.runtime import launch

    if options.backend not in ("local", "ray"):
        raise UserError(f"backend is {options.backend!r}; accepted: local, ray")
    return launch.start_run(
        spec,
        folder,
        policy=policy,
        add_costs=add_costs,
        options=options,
        address=address,
        is_overwriting=is_overwriting,
    )
