"""Starts a training run from the user's file, and resumes one from its folder.

    file ──config──▶ Spec ──start_run──▶ submissions, policy, backend ──▶ run_pipelines
    folder ──spec_of──▶ Spec, and what was submitted late ──resume_run──▶ resume_pipelines
    folder ──scheduler_of──▶ Scheduler, to decide again

The run's log carries the resolved file, so a run can be resumed from its folder alone. What this module does not do:
read profiles, choose a display, or print; its callers hand it what those come to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlmux import plugins
from rlmux.config import Spec
from rlmux.config.checks import CheckTraining
from rlmux.config.load import parse_spec
from rlmux.config.tree import RetriesConfig
from rlmux.core.decision.policy import Policy
from rlmux.core.errors import UserError
from rlmux.core.estimation.colocation import SharingEntry, SharingTable, SharingTriple
from rlmux.core.model import Cluster, FailureCause, Pipeline, Pool
from rlmux.core.scheduler import Scheduler
from rlmux.log import value_codec
from rlmux.log.run_log import LogReader
from rlmux.policies import is_plugin, make_policy
from rlmux.policies.max_min_fairness import FairShares
from rlmux.rl.config import TrainingConfig
from rlmux.rl.determinism_class import DeterminismClass
from rlmux.rl.memory.memory_parts import usual_checkpoint_interval
from rlmux.runtime.backend import RetryRule, Submission
from rlmux.runtime.control.run_control import ParseSubmission, submitted_to
from rlmux.runtime.local import local_backend
from rlmux.runtime.records.input_files import input_files
from rlmux.runtime.run import LOCAL, MakeBackend, RunOptions, RunResult, resume_pipelines, run_pipelines

AddCosts = Callable[[Pipeline, TrainingConfig, Cluster], Pipeline]
"""Returns the pipeline with estimates of what its switches and migrations cost on this machine."""

_PACKAGES = {"mlflow": "mlflow-skinny"}
"""Package that brings a tracker's module, where its name is another."""
_TRAINING = ("torch", "transformers", "safetensors", "tokenizers")


def add_no_costs(pipeline: Pipeline, config: TrainingConfig, cluster: Cluster) -> Pipeline:
    """The pipeline of a run without a profile."""
    return pipeline


def start_run(
    spec: Spec,
    folder: Path,
    *,
    policy: Policy,
    add_costs: AddCosts = add_no_costs,
    options: RunOptions = RunOptions(),
    address: str | None = None,
    is_overwriting: bool = False,
) -> RunResult:
    """Train the file's pipelines in a new folder, on the backend that `options` names. `address`: of a Ray cluster.

    Raises UserError, before anything is made, where the backend or the folder cannot be had.
    """
    options, cluster = _for_file(spec, options, add_costs, address)
    given = submissions(spec, add_costs)
    return run_pipelines(cluster, given, policy, folder, options, spec=header(spec), is_overwriting=is_overwriting)


def resume_run(
    spec: Spec,
    folder: Path,
    *,
    policy: Policy,
    add_costs: AddCosts = add_no_costs,
    options: RunOptions = RunOptions(),
    address: str | None = None,
    retry: Sequence[str] = (),
    check_training: CheckTraining | None = None,
) -> RunResult:
    """Train what is left of a run that was stopped or killed, on the backend it had.

    `spec`: what `spec_of` reads from the folder. Pipelines that were submitted while the run went on are part of it.
    `retry`: names of pipelines that failed and go on, after `check_training` finds nothing wrong with them.
    Raises UserError for a name that did not fail, and for what is found.
    """
    with LogReader(folder) as log:
        backend = str(log.header.get("backend", LOCAL))
    options, cluster = _for_file(spec, replace(options, backend=backend), add_costs, address)
    given = submissions(spec, add_costs)
    for submitted in submitted_to(folder):
        late = parser(spec, add_costs)(submitted.resolved, submitted.source)
        given += [replace(submission, submit_at_s=submitted.at_s + submission.submit_at_s) for submission in late]
    if retry and check_training is not None:
        configs = [submission.config for submission in given if submission.pipeline.id in retry]
        _check_training(configs, check_training, spec.code_folder)
    return resume_pipelines(cluster, given, policy, folder, options, retry=retry)


def _for_file(spec: Spec, options: RunOptions, add_costs: AddCosts, address: str | None) -> tuple[RunOptions, Cluster]:
    """The options with what the file decides, and its cluster; its code can be imported from then on."""
    make_backend, cluster = backend_maker(options.backend, address, spec.cluster)
    plugins.look_in(spec.code_folder)
    options = replace(options, make_backend=make_backend, parse=parser(spec, add_costs), shares=spec.shares)
    return replace(options, trackers=trackers_of(spec), keep=spec.keep), cluster


def _check_training(configs: Sequence[TrainingConfig], check: CheckTraining, code_folder: Path) -> None:
    for config, complaint in zip(configs, check(configs, code_folder), strict=True):
        if complaint is not None:
            raise UserError(f"pipeline {config.name}: {complaint}")


def backend_maker(backend: str, address: str | None, cluster: Cluster) -> tuple[MakeBackend, Cluster]:
    """(Factory of the run's backend, cluster with the machine of each node where Ray runs it).

    Raises UserError, before anything is made, where the backend cannot be had: its package is not installed, it takes
    no address, no cluster answers there, or the cluster has less than the file needs.
    """
    if backend == LOCAL:
        if address is not None:
            raise UserError(f"--address {address}: only --backend ray takes one")
        return local_backend, cluster
    try:
        from rlmux.runtime.ray.cluster import machines_of
        from rlmux.runtime.ray.ray_backend import join_cluster, ray_backend
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise UserError("--backend ray: ray is not installed; install it with: pip install 'rlmux[ray]'") from None
    nodes, probes = join_cluster(cluster, address)
    machines = machines_of(nodes, {ray_id: probe.machine for ray_id, probe in probes.items()})
    return partial(ray_backend, address=address), cluster.with_machines(machines)


def check_installed() -> None:
    """Raises UserError where a package that every training needs is not installed."""
    missing = [name for name in _TRAINING if find_spec(name) is None]
    if missing:
        raise UserError(f"training: {missing[0]} is not installed; install it with: pip install 'rlmux[train]'")


def trackers_of(spec: Spec) -> list[str]:
    """Trackers that get each step while the file's run goes on. Raises UserError for one that is not installed."""
    names = [each.name for each in fields(spec.trackers) if getattr(spec.trackers, each.name) is not None]
    for name in names:
        if find_spec(name) is None:
            package = _PACKAGES.get(name, name)
            raise UserError(f"{spec.source}: trackers.{name}: it is not installed; accepted: pip install {package}")
    return names


def parser(run: Spec, add_costs: AddCosts = add_no_costs) -> ParseSubmission:
    """The parser of files submitted to this run, on the run's cluster, whatever cluster they name."""

    def parse(text: str, source: str) -> list[Submission]:
        spec = parse_spec(text, source=source, folder=run.code_folder, cluster_of=run)
        plugins.look_in(spec.code_folder, is_late=True)
        return submissions(spec, add_costs)

    return parse


def submissions(spec: Spec, add_costs: AddCosts = add_no_costs) -> list[Submission]:
    """The file's pipelines as submissions, with the costs of this machine."""
    return [
        Submission(
            pipeline=add_costs(given.pipeline, given.config, spec.cluster),
            config=given.config,
            submit_at_s=given.keys.submit_at_s,
            inputs=input_files(given.config, spec.code_folder),
            code_folder=spec.code_folder,
            determinism_class=None if given.keys.promise is None else DeterminismClass(given.keys.promise),
            call_limit_s=given.keys.call_limit_s,
            checkpoint_every=given.keys.checkpoint_every or usual_checkpoint_interval(given.config),
            keep_checkpoints=given.keys.keep_checkpoints,
            keeps_samples=given.keys.samples,
            retries=_retry_rule(given.keys.retries),
            alerts={rule: asdict(its) for rule, its in given.keys.alerts.items()},
        )
        for given in spec.pipelines
    ]


def _retry_rule(keys: RetriesConfig) -> RetryRule:
    by_cause = {cause: most for cause in FailureCause if (most := getattr(keys, cause.value, 0))}
    return RetryRule(any_reason=keys.any_reason, by_cause=by_cause)


def header(spec: Spec) -> Mapping[str, Any]:
    """The file's part of the log header."""
    return {"source": spec.source, "resolved": spec.resolved}


def spec_of(folder: Path, overrides: Sequence[str] = ()) -> Spec:
    """The file that began a run, as its log keeps it, with the policy of the run, and with KEY=VALUE laid over it.

    Raises UserError where the log keeps none.
    """
    with LogReader(folder) as log:
        header = log.header
    written = header.get("spec") or {}
    if "resolved" not in written:
        raise UserError(f"{folder}: its log keeps no file to resume from; accepted: a folder that `rlmux run` made")
    spec = parse_spec(
        written["resolved"],
        source=f"{folder} ({written['source']})",
        folder=folder.absolute(),
        overrides=overrides,
        may_be_empty=True,
    )
    return replace(spec, policy=str(header["policy"]))


def cluster_of(folder: Path) -> Cluster:
    """The cluster of a run, or of a broker, as its log has it. Raises UserError where the log does not hold it."""
    with LogReader(folder) as log:
        header = log.header
    if not header.get("cluster"):
        raise UserError(f"{folder}: its log does not hold the cluster; accepted: a run of rlmux 0.3 or later")
    pools = value_codec.reader(tuple[Pool, ...])(header["cluster"], "cluster")
    return Cluster(pools={pool.name: pool for pool in pools})


def scheduler_of(folder: Path, resumed: Mapping[str, Any] | None = None) -> Scheduler:
    """A scheduler as the run's was before its first event, or before the first after it was resumed.

    `resumed`: fields of the note about that (`ResumedNote`): a resumed run may have other machines.
    Raises UserError for a policy that cannot be loaded, and a log that does not hold the cluster.
    """
    cluster = cluster_of(folder)
    if resumed is not None:
        cluster = cluster.with_machines(resumed.get("machines") or {})
    with LogReader(folder) as log:
        header = log.header
    policy = str(header["policy"])
    if is_plugin(policy):
        plugins.look_in(spec_of(folder).code_folder, is_late=True)
    sharing = header["sharing"] and SharingTable(
        value_codec.reader(tuple[SharingEntry, ...])(header["sharing"]["entries"], "sharing"),
        value_codec.reader(tuple[SharingTriple, ...])(header["sharing"]["triples"], "sharing"),
    )
    return Scheduler(cluster, make_policy(policy, sharing=sharing), FairShares())
