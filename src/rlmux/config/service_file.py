"""The file of a service: the lanes that it keeps running, each a cluster and a policy.

    ServiceFile ── lanes ── LaneConfig ── cluster, policy          one lane: one file without pipelines, one run
                                       ── serve                    models for Tinker clients and permits, of one lane

Read as the file of a run is: strict types, unknown keys are errors, a mistake is one line with its place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import MinLen
from pydantic import TypeAdapter, ValidationError

from rlmux.config.error_messages import explain, spec_error
from rlmux.config.file_kind import FileKind, check_kind
from rlmux.config.load import Spec, read_text, spec_of_tree
from rlmux.config.serve_file import ServeConfig, checked_serve
from rlmux.config.shares import SharesConfig
from rlmux.config.source_map import Node, parse_yaml
from rlmux.config.tree import ClusterConfig, Keep, TrackersConfig
from rlmux.rl.config import FromFile, Name

RESERVED = ("bundles",)
"""Names that a lane cannot have: the service's folder has others of these names."""


OWN_LANE = "here"
"""Lane of a service without a file of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneConfig(FromFile):
    """Devices that one scheduler shares among all pipelines of the lane."""

    cluster: ClusterConfig
    """The devices there are."""
    policy: str = "rollmux"
    """Policy (docs/reference/cli.md lists them)."""
    serve: ServeConfig | None = None
    """Models for Tinker clients and permits for programs; at most one lane of a file has it."""
    trackers: TrackersConfig | None = None
    """Trackers that get each step of the lane's pipelines while they train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFile(FromFile):
    """The file of `rlmux serve`."""

    lanes: Annotated[Mapping[Name, LaneConfig], MinLen(1)]
    """Lanes by name."""
    shares: SharesConfig | None = None
    """Fair shares of projects and users in every lane. Default: all equal, and no pipeline is parked."""
    keep: Keep | None = None
    """How long files of pipelines that are over are kept, in every lane. Default: until `rlmux remove`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One lane of the file, checked."""

    spec: Spec
    """Its file, without pipelines."""
    serve: ServeConfig | None = None
    """What it serves beside submissions, paths made absolute."""


def load_service_file(path: Path, *, folder: Path | None = None, policies: Sequence[str]) -> dict[str, Lane]:
    """Every lane by its name. `folder`: where the code of its pipelines would lie; by default beside the file."""
    base = path.absolute().parent
    return parse_service_file(read_text(path), source=str(path), folder=folder or base, base=base, policies=policies)


def parse_service_file(text: str, *, source: str, folder: Path, base: Path, policies: Sequence[str]) -> dict[str, Lane]:
    """`load_service_file` for a text that is at hand. `base`: the folder that paths of models are relative to."""
    root = parse_yaml(text, source)
    check_kind(root, FileKind.LANES, source)
    _check_lanes(root)
    try:
        file = TypeAdapter(ServiceFile).validate_json(json.dumps(root.plain()))
    except ValidationError as error:
        raise explain(error, root, ServiceFile) from None
    lanes = {}
    for name, given in file.lanes.items():
        path = ["lanes", name]
        if name in RESERVED:
            raise spec_error(root, path, f"cannot be named so; accepted: any but {', '.join(RESERVED)}")
        tree = root.nearest(path).without("serve")
        if file.shares is not None:
            tree = tree.replaced(["shares"], root.nearest(["shares"]))
        if file.keep is not None:
            tree = tree.replaced(["keep"], root.nearest(["keep"]))
        spec = spec_of_tree(tree, source=source, folder=folder, policies=policies, may_be_empty=True)
        serve = given.serve and checked_serve(root, path, given.serve, spec.cluster, base)
        lanes[name] = Lane(spec=spec, serve=serve)
    serving = [name for name, lane in lanes.items() if lane.serve is not None]
    if len(serving) > 1:
        raise spec_error(root, ["lanes", serving[1], "serve"], f"is given in lane {serving[0]} too; accepted: one lane")
    return lanes


def file_of_machine(num_devices: int) -> str:
    """A commented file with one lane of this machine's devices, half of them for each phase."""
    num_rollout = max(1, num_devices // 2)
    pools = [f"rollout: {{devices: {num_rollout}}}", f"train: {{devices: {num_devices - num_rollout}}}"]
    if num_devices == 1:
        pools = ["both: {phase: both, devices: 1}"]
    lines = ["lanes:", f"  {OWN_LANE}:", "    policy: rlmux", "    cluster:", "      pools:"]
    return "\n".join([_ABOVE, *lines, *(f"        {pool}" for pool in pools), _BELOW])


_ABOVE = "# Your service on this machine. `rlmux serve` reads this file when it starts."
_BELOW = """\
    # Models for Tinker clients, on the same devices. A name is ORG/NAME; without a path it is a tiny new model.
    # serve:
    #   models:
    #     rlmux/tiny: {max_prompt_tokens: 256, max_new_tokens: 128}
    #     Qwen/Qwen3-0.6B: {model: {path: /models/Qwen3-0.6B}}
"""


def _check_lanes(root: Node) -> None:
    """Raises SpecError for a section that belongs to a lane, or beside them."""
    if not isinstance(root.value, dict):
        return
    if "lanes" in root.value:
        _check_places(root)
    elif "serve" in root.value:
        raise spec_error(root, ["serve"], "belongs to a lane; accepted: lanes: {NAME: {cluster: ..., serve: ...}}")


def _check_places(root: Node) -> None:
    """Raises SpecError for a section of one lane that holds in all of them."""
    lanes = root.nearest(["lanes"]).plain()
    for name, lane in lanes.items() if isinstance(lanes, dict) else ():
        for section in ("shares", "keep"):
            if isinstance(lane, dict) and section in lane:
                raise spec_error(
                    root,
                    ["lanes", name, section],
                    f"holds in every lane; accepted: {section}: beside lanes, at the file's top",
                )
