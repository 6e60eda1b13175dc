"""What `rlmux check` finds in a file: the loader of its kind reads it, and nothing is started.

file ── kind_of ──▶ pipelines | lanes | permits ──▶ check_file ──▶ CheckedFile
                                                                       └──▶ UserError; further mistakes are its notes
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rlmux.cli import inputs
from rlmux.config import file_kind
from rlmux.config.file_kind import FileKind, check_kind
from rlmux.config.load import read_text
from rlmux.config.source_map import parse_yaml
from rlmux.core.errors import UserError
from rlmux.core.model import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedCluster:
    """Devices and the policy that schedules them."""

    lane: str | None = None
    """Name of the lane; None in other files."""
    policy: str
    """Name of the policy."""
    devices: Mapping[str, int | None]
    """Number of devices by pool; None: not limited."""
    gpus_per_device: Mapping[str, int] = field(default_factory=dict)
    """GPUs of a device by pool, where it has several."""
    models: Sequence[str] = ()
    """Names of the models that the lane serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedFile:
    """A file without mistakes."""

    kind: FileKind
    """What the file describes."""
    names: Sequence[str]
    """Names of its pipelines or lanes."""
    clusters: Sequence[CheckedCluster]
    """One for each lane; one in other files."""


def kind_of(file: str) -> FileKind:
    """The kind of a file by its keys. Raises SpecError for an unreadable file, and for shares alone."""
    root = parse_yaml(read_text(Path(file)), file)
    kind = file_kind.kind_of(root)
    if kind is FileKind.SHARES:
        check_kind(root, FileKind.PIPELINES, file)
    return kind


def check_file(file: str, sets: Sequence[str]) -> CheckedFile:
    """Check a file with the loader of its kind. Raises UserError for a mistake."""
    kind = kind_of(file)
    if sets and kind is FileKind.LANES:
        raise UserError(f"--set {sets[0]}: {file} has {kind}; accepted: a file of `rlmux run` or `broker`")
    return {
        FileKind.PIPELINES: _check_pipelines,
        FileKind.LANES: _check_lanes,
        FileKind.PERMITS: _check_permits,
    }[kind](file, sets)


def _check_pipelines(file: str, sets: Sequence[str]) -> CheckedFile:
    from rlmux.api import commands
    from rlmux.rl.memory.memory_parts import usual_checkpoint_interval

    spec = commands.check(file, overrides=sets, on_warning=inputs.print_notice)
    unprobed = [pipeline.name for pipeline in spec.pipelines if pipeline.keys.promise is not None]
    if unprobed:
        inputs.print_notice(f"promises of {', '.join(unprobed)}: not probed; `rlmux run` probes them before it starts")
    for pipeline in spec.pipelines:
        interval = 1 if pipeline.training is None else usual_checkpoint_interval(pipeline.training)
        if interval > 1 and pipeline.keys.checkpoint_every is None:
            text = f"{pipeline.name}: a checkpoint every {interval} steps, as for any model of its size"
            inputs.print_notice(f"{text}; checkpoint_every sets another interval")
    names = [pipeline.name for pipeline in spec.pipelines]
    return CheckedFile(kind=FileKind.PIPELINES, names=names, clusters=[_cluster(spec.policy, spec.cluster)])


def _check_lanes(file: str, _: Sequence[str]) -> CheckedFile:
    from rlmux.config.service_file import load_service_file
    from rlmux.policies import POLICIES
    from rlmux.service.lanes.devices import check_devices

    lanes = load_service_file(Path(file), policies=list(POLICIES))
    check_devices({name: lane.spec for name, lane in lanes.items()})
    clusters = [
        replace(
            _cluster(lane.spec.policy, lane.spec.cluster),
            lane=name,
            models=[] if lane.serve is None else list(lane.serve.models),
        )
        for name, lane in lanes.items()
    ]
    return CheckedFile(kind=FileKind.LANES, names=list(lanes), clusters=clusters)


def _check_permits(file: str, sets: Sequence[str]) -> CheckedFile:
    spec = inputs.load_for_broker(file, sets, None)
    devices: dict[str, int | None] = {name: pool.gpus_per_node for name, pool in spec.cluster.pools.items()}
    return CheckedFile(kind=FileKind.PERMITS, names=[], clusters=[CheckedCluster(policy=spec.policy, devices=devices)])


def _cluster(policy: str, cluster: Cluster) -> CheckedCluster:
    devices = {
        name: None if pool.num_nodes is None else pool.num_nodes * pool.devices_per_node
        for name, pool in cluster.pools.items()
    }
    gpus = {name: pool.gpus_per_node for name, pool in cluster.pools.items() if pool.gpus_per_node > 1}
    return CheckedCluster(policy=policy, devices=devices, gpus_per_device=gpus)


def show(file: str, checked: CheckedFile, *, as_json: bool) -> None:
    """Print `FILE: ok: 2 pipelines, policy rollmux, devices rollout 1, train 1`."""
    if as_json:
        print(json.dumps({"file": file, "ok": True, **asdict(checked), "mistakes": []}))
        return
    number = len(checked.names)
    what = f"{number} {checked.kind if number != 1 else checked.kind.removesuffix('s')}" if number else checked.kind
    between = "; " if checked.kind is FileKind.LANES else ", "
    print(f"{file}: ok: {between.join([what, *map(_shown, checked.clusters)])}")


def show_mistakes(file: str, error: UserError, *, as_json: bool) -> None:
    """Print each mistake on a line of stderr, the first one first."""
    mistakes = [str(error), *getattr(error, "__notes__", ())]
    if as_json:
        print(json.dumps({"file": file, "ok": False, "mistakes": mistakes}))
        return
    for mistake in mistakes:
        inputs.print_notice(" ".join(mistake.split()))


def _shown(cluster: CheckedCluster) -> str:
    size = {name: f" of {number} GPUs" for name, number in cluster.gpus_per_device.items()}
    devices = ", ".join(
        f"{name} {'any' if number is None else number}{size.get(name, '')}" for name, number in cluster.devices.items()
    )
    lane = "" if cluster.lane is None else f"{cluster.lane}: "
    models = f", models {', '.join(cluster.models)}" if cluster.models else ""
    return f"{lane}policy {cluster.policy}, devices {devices}{models}"
