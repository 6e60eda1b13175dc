"""Policies: strangers that look at frozen views and return choices.

    place(pipeline, view)   which group and nodes a pipeline gets           placement tier
    rebalance(view)         which placed pipelines had better move          placement tier, after each change
    dispatch(view)          which ready work starts on which free device    group tier

One file each; `POLICIES` maps the name a user types to the class. To add one, write its file and its line
here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from rlmux.core.model import Pipeline
from rlmux.core.placement import PlacementChoice, PlacementView, Refusal, Relocation
from rlmux.core.policies.colocated import Colocated
from rlmux.core.policies.fifo import Fifo
from rlmux.core.policies.gap_ratio import GapRatio
from rlmux.core.policies.gavel import Gavel
from rlmux.core.policies.jigsaw import Jigsaw
from rlmux.core.policies.most_idle import MostIdle
from rlmux.core.policies.optimal import Optimal
from rlmux.core.policies.random_groups import RandomGroups
from rlmux.core.policies.rlmux import RlMux
from rlmux.core.policies.rollmux import RollMux
from rlmux.core.policies.solo import Solo
from rlmux.core.policies.split import Split
from rlmux.core.policies.static_sharing import mux_all, mux_rollouts, mux_training, serial

if TYPE_CHECKING:
    from rlmux.core.views import Choice, GroupView


class Policy(Protocol):
    """What the scheduler asks."""

    @property
    def name(self) -> str: ...

    @property
    def reacts_to_progress(self) -> bool:
        """Whether dispatch is asked again at every ChunkFinished."""
        ...

    def place(self, pipeline: Pipeline, view: PlacementView) -> PlacementChoice | Refusal:
        """Where the pipeline goes, or why it does not."""
        ...

    def rebalance(self, view: PlacementView) -> tuple[Relocation, ...]:
        """Moves that make the placement cheaper, each valid once those before it are done. Mostly none."""
        ...

    def dispatch(self, view: GroupView) -> Iterable[Choice]:
        """What starts, pauses or moves in this group now."""
        ...


POLICIES: Mapping[str, Callable[[], Policy]] = {
    "solo": Solo,
    "colocated": Colocated,
    "split": Split,
    "fifo": Fifo,
    "gap-ratio": GapRatio,
    "gavel": Gavel,
    "random": RandomGroups,
    "most-idle": MostIdle,
    "rollmux": RollMux,
    "jigsaw": Jigsaw,
    "serial": serial,
    "mux-rollouts": mux_rollouts,
    "mux-training": mux_training,
    "mux-all": mux_all,
    "rlmux": RlMux,
    "optimal": Optimal,
}
"""By the name a user types."""
