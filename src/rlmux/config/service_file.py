"""The file of a service: the lanes that it keeps running, each a cluster and a policy.

    ServiceFile ── lanes ── LaneConfig ── cluster, policy          one lane: one file without pipelines, one run

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
from rlmux.config.load import Spec, read_text, spec_of_tree
from rlmux.config.shares import SharesConfig
from rlmux.config.source_map import parse_yaml
from rlmux.config.tree import ClusterConfig
from rlmux.rl.config import FromFile, Name

RESERVED = ("bundles",)
"""Names that a lane cannot have: the service's folder has others of these names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneConfig(FromFile):
    """Devices that one scheduler shares among all pipelines that are submitted to the lane."""

    cluster: ClusterConfig
    """The devices there are."""
    policy: str = "rollmux"
    """Policy that decides (docs/reference/cli.md lists policies)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFile(FromFile):
    """The whole file of `rlmux serve` for a service that pipelines are submitted to."""

    lanes: Annotated[Mapping[Name, LaneConfig], MinLen(1)]
    """Lanes by name."""
    shares: SharesConfig | None = None
    """What projects and users are entitled to in every lane; without: all alike, and none is parked."""


def is_service_file(path: Path) -> bool:
    """Whether a file has lanes. Raises SpecError for one that cannot be read."""
    tree = parse_yaml(read_text(path), str(path))
    return isinstance(tree.value, dict) and "lanes" in tree.value


def load_service_file(path: Path, *, folder: Path, policies: Sequence[str]) -> dict[str, Spec]:
    """The file of each lane by its name, without pipelines. `folder`: where their code would lie."""
    source = str(path)
    root = parse_yaml(read_text(path), source)
    try:
        file = TypeAdapter(ServiceFile).validate_json(json.dumps(root.plain()))
    except ValidationError as error:
        raise explain(error, root, ServiceFile) from None
    lanes = {}
    for name in file.lanes:
        if name in RESERVED:
            raise spec_error(root, ["lanes", name], f"cannot be named so; accepted: any but {', '.join(RESERVED)}")
        tree = root.nearest(["lanes", name])
        if file.shares is not None:
            tree = tree.replaced(["shares"], root.nearest(["shares"]))
        lanes[name] = spec_of_tree(tree, source=source, folder=folder, policies=policies, may_be_empty=True)
    return lanes
