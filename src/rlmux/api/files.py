"""From what a caller names to a checked file: a path, a mapping made in code, or a file that is loaded already.

path | mapping | Spec ─┬▶ load_file(purpose=RUN | PLAN) ─▶ Spec ─┬▶ policy_and_costs ─▶ what a run is started with
profile ───────────────┴─────────────────────────────────────────┘

Old keys of a file and unusable parts of a profile are warnings of the logger `rlmux`, or calls of `on_warning`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlmux import plugins
from rlmux.config import Purpose, Spec, load_spec
from rlmux.config.checks import CheckTraining
from rlmux.config.figures import Estimated, FigureOrigin, figures_of
from rlmux.config.load import parse_spec
from rlmux.config.tree import ClusterConfig, PipelineConfig
from rlmux.core.decision.policy import Policy
from rlmux.core.errors import SpecError, UserError
from rlmux.policies import POLICIES, check_policy, is_plugin, make_policy

if TYPE_CHECKING:
    from rlmux.config.load import EstimateOf
    from rlmux.profiling.step_estimates import StepEstimates
    from rlmux.runtime.launch import AddCosts
    from rlmux.sim.api import WorkloadMaker
    from rlmux.sim.workloads.arrivals import Workload

File = str | Path | Mapping[str, Any] | Spec
"""A YAML file's path, its keys and values as a mapping, or what `rlmux.load` returned."""

IN_CODE = "the mapping"
"""Source of a file that was made in code, in errors and logs."""
OnWarning = Callable[[str], None]
"""Takes a warning, a line of text."""
warn: OnWarning = logging.getLogger("rlmux").warning


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanBy:
    """What a plan's estimates are made of, after the file's own."""

    run: str | Path | None = None
    """Folder of a run: what it measured of pipelines with the same names."""
    gpu: str | None = None
    """GPU of pools that name none, by default this machine's."""
    answer_tokens: float | None = None
    """Mean tokens of an answer, where they are known."""


def load_file(
    file: File,
    *,
    purpose: Purpose,
    overrides: Sequence[str] = (),
    policy: str | None = None,
    cluster_of: Spec | None = None,
    may_be_empty: bool = False,
    profile: str | Path | None = None,
    plan_by: PlanBy = PlanBy(),
    on_warning: OnWarning = warn,
) -> Spec:
    """The file, with all checked that the purpose needs. Raises SpecError, UserError for an unknown policy, and to plan
    RefusedError for a worker that needs more memory than a device of its pool has.

    Paths of a mapping are relative to the working folder. `cluster_of`: the run whose cluster holds instead of the
    file's. `may_be_empty`: it may be without pipelines. `profile`: gives pipelines without an estimate the measured
    one. To plan, its device may be any, and UserError is raised for a pipeline that it has no estimate for; to run, it
    is raised for another device. `plan_by`: to plan, what estimates are made of that the file does not give.
    `on_warning`: receives each pool of a run without a price beside one with a price, and the estimates taken.
    """
    if policy is not None:
        check_policy(policy)
    measured = None if profile is None else _read_estimates(Path(profile), purpose)
    taken: list[str] = []
    spec = _load(
        file,
        overrides=tuple(overrides),
        purpose=purpose,
        check_training=_check_training(purpose),
        policies=list(POLICIES),
        cluster_of=cluster_of,
        may_be_empty=may_be_empty,
        estimate_of=_estimate_of(purpose, measured, plan_by, on_warning, taken),
    )
    if purpose is Purpose.RUN and cluster_of is None:
        from rlmux.sim.workloads.arrivals import notes_of_prices

        for note in notes_of_prices(spec.cluster):
            on_warning(note)
    if measured is not None and taken:
        on_warning(f"--profile {profile}: estimates of {', '.join(taken)} taken, as measured on {measured.device!r}")
    spec = spec if policy is None else replace(spec, policy=policy)
    look_for_plugin(spec.policy, spec.code_folder)
    if purpose is Purpose.PLAN:
        _check_fits(spec)
    return spec


def _check_fits(spec: Spec) -> None:
    """The memory check of `run`, of pipelines with a task: nothing is known of others."""
    from rlmux.runtime.backend import Submission
    from rlmux.runtime.memory.memory_budget import check_each_fits, has_gpu_sized_devices, with_footprint

    is_gpu = has_gpu_sized_devices(spec.cluster)
    known = [Submission(pipeline=given.pipeline, config=given.training) for given in spec.pipelines if given.training]
    check_each_fits(
        spec.cluster, [with_footprint(submission, spec.cluster, is_gpu=is_gpu) for submission in known], is_gpu=is_gpu
    )


def _read_estimates(path: Path, purpose: Purpose) -> StepEstimates:
    from rlmux.profiling.step_estimates import load_estimates, refuse_other_device

    measured = load_estimates(path)
    if purpose is Purpose.RUN:
        from rlmux.profiling.interference_probe import fractions_here  # brings torch along, to look at the devices

        refuse_other_device(path, measured.device, fractions_here().device)
    return measured


def _estimate_of(
    purpose: Purpose, measured: StepEstimates | None, plan_by: PlanBy, on_warning: OnWarning, taken: list[str]
) -> EstimateOf | None:
    """What is known of a pipeline: its own keys, or else a run's, or the profile's; to plan, the rest by a roofline.

    Names of pipelines that the profile is used for are added to `taken`.
    """
    if purpose is Purpose.RUN:
        return None if measured is None else partial(_profiled, measured, purpose, on_warning, taken)
    from rlmux.profiling.recorded_steps import read_recorded
    from rlmux.profiling.roofline_estimates import RooflineEstimates
    from rlmux.runtime.gpus_here import name_of_gpu

    rooflines = RooflineEstimates(gpu=plan_by.gpu or name_of_gpu(), answer_tokens=plan_by.answer_tokens)
    recorded = {} if plan_by.run is None else read_recorded(Path(plan_by.run))

    def to_plan(pipeline: PipelineConfig, cluster: ClusterConfig) -> Estimated | None:
        found = recorded.get(pipeline.name)
        if found is None and measured is not None:
            found = _profiled(measured, purpose, on_warning, taken, pipeline, cluster)
        return rooflines.of(pipeline, cluster, found)

    return to_plan


def _profiled(
    measured: StepEstimates,
    purpose: Purpose,
    on_warning: OnWarning,
    taken: list[str],
    pipeline: PipelineConfig,
    _: ClusterConfig,
) -> Estimated | None:
    """The measured estimate of a pipeline whose file has none. A run goes on without, since it measures by itself."""
    if pipeline.estimate is not None or pipeline.is_filler or (purpose is Purpose.RUN and not measured.by_pipeline):
        return None
    try:
        estimate = measured.of(pipeline)
    except UserError as error:
        if purpose is Purpose.PLAN:
            raise
        on_warning(f"{error}; the run measures it")
        return None
    taken.append(pipeline.name)
    return Estimated(estimate=estimate, figures=figures_of(estimate, FigureOrigin.PROFILED, str(measured.path)))


def load_workload(
    workload: File | Workload,
    overrides: Sequence[str] = (),
    on_warning: OnWarning = warn,
    *,
    profile: str | Path | None = None,
) -> Workload | WorkloadMaker | str:
    """The workload of a YAML file, or of a CSV file on another cluster; a name is returned for the simulator to look
    up. `profile`: as for `load_file`; raises UserError if the workload is not a YAML file."""
    from rlmux.sim.workloads import spec_file, trace_csv
    from rlmux.sim.workloads.arrivals import Workload, h20_h800_cluster
    from rlmux.sim.workloads.catalog import file_and_noise
    from rlmux.sim.workloads.noise import noisy_maker

    if isinstance(workload, Workload):
        return workload
    path, noise = file_and_noise(str(workload)) if isinstance(workload, str | Path) else (None, 0.0)
    suffix = path.suffix if path is not None else "" if isinstance(workload, str | Path) else ".yaml"
    if suffix in (".yaml", ".yml"):
        file = workload if path is None else path
        spec = load_file(file, purpose=Purpose.PLAN, overrides=overrides, profile=profile, on_warning=on_warning)
        return noisy_maker(spec_file.workload_of(spec), noise)
    text = str(workload)
    if profile is not None:
        raise UserError(f"--profile {profile}: {text!r} has no pipelines to estimate; accepted: a YAML file, or a run")
    if not overrides:
        if ":" in text:  # perhaps module:function, which may be here
            plugins.look_in(Path.cwd())
        return text
    if suffix != ".csv":
        raise UserError(
            f"--set {overrides[0]}: only a YAML file takes overrides, and {text!r} is none; a CSV file takes those of "
            f"cluster, and a name takes parameters: {text.partition(':')[0]}:key=value"
        )
    assert path is not None
    made = trace_csv.load(path, cluster=spec_file.cluster_of(h20_h800_cluster(), overrides, str(path)))
    return noisy_maker(made, noise)


def look_for_plugin(policy: str, folder: Path) -> None:
    """Let a policy of the user's own be found in the folder of the file's code."""
    if is_plugin(policy):
        plugins.look_in(folder)


def policy_and_costs(spec: Spec, profile: str | Path | None, on_warning: OnWarning = warn) -> tuple[Policy, AddCosts]:
    """The file's policy with the profile's measurements, and what adds the measured costs to each pipeline.

    `on_warning`: receives each unusable part of the profile and its replacement. Raises UserError for a profile of
    another device or of other models.
    """
    from rlmux.runtime.launch import add_no_costs

    look_for_plugin(spec.policy, spec.code_folder)
    if profile is None:
        return make_policy(spec.policy), add_no_costs
    from rlmux.profiling.interference_probe import fractions_here  # brings torch along, to look at the devices
    from rlmux.profiling.profile_file import load_costs, load_sharing, sub_stages_of

    here = fractions_here()
    costs, warnings = load_costs(Path(profile), here.device, [each.config for each in spec.pipelines])
    sharing, more = load_sharing(Path(profile), here, sub_stages_of(each.pipeline for each in spec.pipelines))
    policy = make_policy(spec.policy, sharing=sharing)
    if policy.sharing is None:
        more.append(f"--profile: policy {spec.policy} gives devices as a whole: only switches and migrations are used")
    for warning in [*warnings, *more]:
        on_warning(warning)
    return policy, costs.add_to


def _load(file: File, **how: Any) -> Spec:
    if isinstance(file, str | Path):
        return load_spec(file, **how)
    text, source, folder = _text_of(file)
    try:
        loaded = parse_spec(text, source=source, folder=folder, **how)
    except SpecError as error:  # the lines are of a text that is not the caller's
        raise SpecError(re.sub(rf"^{re.escape(source)}:\d+", source, str(error))) from None
    return replace(loaded, policy=file.policy) if isinstance(file, Spec) else loaded


def _check_training(purpose: Purpose) -> CheckTraining | None:
    if purpose is not Purpose.RUN:
        return None
    from rlmux.runtime.checks.preflight import complaints_about

    return complaints_about


def _text_of(file: Mapping[str, Any] | Spec) -> tuple[str, str, Path]:
    """(YAML, name of the source, folder that its paths are relative to)."""
    if isinstance(file, Spec):
        return file.resolved, file.source, file.code_folder
    if not isinstance(file, Mapping):
        raise UserError(f"{file!r} is no file; accepted: a path, a mapping, or what rlmux.load returned")
    import yaml

    try:
        return yaml.safe_dump(_plain(file), sort_keys=False, allow_unicode=True), IN_CODE, Path.cwd()
    except yaml.YAMLError as error:
        raise UserError(f"{IN_CODE}: {error}; accepted: numbers, texts, lists and mappings") from None


def _plain(value: Any) -> Any:
    """Mappings and sequences of any kind as dicts and lists, paths as texts."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value
