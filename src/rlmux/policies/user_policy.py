"""A policy that a user wrote, held to what every policy promises.

    make_policy("module:Class") ─▶ Checked ─▶ the user's object

    promise                                  broken by                               found
    a policy keeps nothing in mind           a class that is no frozen dataclass,    when it is made
                                             or a field that can change
    a choice follows from the view alone     another choice for the same view          when each is called twice
    a choice is a value of `core/decision/views.py`   anything else                           at that choice
    a choice is allowed                      work that is not ready, a held device   by the scheduler

Each is one line that names the policy and the promise. A promise that is broken in a run fails that decision alone: the
plain order of work stands in for it, and the run goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar

from rlmux import plugins
from rlmux.core.decision.plan import GroupPlan
from rlmux.core.decision.policy import Idling, Policy, TurnTaking
from rlmux.core.decision.views import GroupView
from rlmux.core.errors import PolicyError, RlmuxError, UserError
from rlmux.core.estimation.colocation import SharingTable
from rlmux.core.model import Pipeline
from rlmux.core.placement.choice import FruitlessSearch, PlacementChoice, Refusal, Relocation
from rlmux.core.placement.view import PlacementView

A = TypeVar("A")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked(Policy):
    """The user's policy: each method is called twice, and each result checked. Abilities are those of the object."""

    name: str = field()
    """Name or `module:Class` that the user typed: a run is resumed by it."""
    wrapped: Policy
    """The user's object."""

    @property
    def reacts_to_progress(self) -> bool:
        return self.wrapped.reacts_to_progress

    @property
    def sharing(self) -> SharingTable | None:
        return self.wrapped.sharing

    @property
    def tails(self) -> bool:
        return self.wrapped.tails

    @property
    def splits_evenly(self) -> bool:
        return self.wrapped.splits_evenly

    @property
    def turn_taking(self) -> TurnTaking | None:
        return self.wrapped.turn_taking

    def idling(self, view: GroupView) -> Idling:
        return self.wrapped.idling(view)

    def with_sharing(self, sharing: SharingTable) -> Checked:
        """The same with this table."""
        known: Any = self.wrapped
        return replace(self, wrapped=replace(known, sharing=sharing))

    def place(self, pipeline: Pipeline, view: PlacementView) -> PlacementChoice | Refusal:
        found = self._twice("place", lambda: self.wrapped.place(pipeline, view))
        if not isinstance(found, PlacementChoice | Refusal):
            raise self._error("place", f"answered {found!r}; accepted: a PlacementChoice or a Refusal")
        return found

    def rebalance(self, view: PlacementView) -> tuple[Relocation | FruitlessSearch, ...]:
        found = self._twice("rebalance", lambda: tuple(self.wrapped.rebalance(view)))
        for each in found:
            if not isinstance(each, Relocation | FruitlessSearch):
                raise self._error("rebalance", f"answered {each!r}; accepted: Relocation and FruitlessSearch")
        return found

    def dispatch(self, plan: GroupPlan) -> GroupPlan:
        """The caller repeats it, with a fresh plan."""
        with self._naming_errors("dispatch"):
            found = self.wrapped.dispatch(plan)
        if found is not plan:
            raise self._error("dispatch", f"returned {found!r}; accepted: the plan that it was given, filled")
        return plan

    def _twice(self, method: str, call: Callable[[], A]) -> A:
        with self._naming_errors(method):
            first, second = call(), call()
        self.compare(method, first, second)
        return first

    @contextmanager
    def _naming_errors(self, method: str) -> Iterator[None]:
        try:
            yield
        except RlmuxError:
            raise
        except Exception as error:  # the user's code may raise anything
            raise self._error(method, f"raised {plugins.described(error)}") from error

    def compare(self, method: str, first: Any, second: Any) -> None:
        if first != second:
            raise self._error(
                method,
                f"returned {first!r}, and {second!r} when called again with the same view; accepted: a choice that "
                "follows from the view alone",
            )

    def _error(self, method: str, what: str) -> PolicyError:
        return PolicyError(f"policy {self.name}: {method} {what}")


def user_policy(text: str, built_in: tuple[str, ...]) -> Checked:
    """The plug-in of that name. Raises UserError where there is none, or where it could keep something in mind."""
    make = plugins.find("policy", text, built_in)
    try:
        made = make()
    except Exception as error:  # the user's code may raise anything
        raise UserError(
            f"policy {text!r}: making it without arguments raised {plugins.described(error)}; accepted: a frozen "
            "dataclass whose fields have default values"
        ) from error
    if not isinstance(made, Policy):
        raise UserError(f"policy {text!r} is no policy; accepted: a subclass of rlmux.policy.Policy")
    _refuse_memory(text, made)
    return Checked(name=text, wrapped=made)


def _refuse_memory(text: str, made: Any) -> None:
    parameters = getattr(type(made), "__dataclass_params__", None)
    if not is_dataclass(made) or parameters is None or not parameters.frozen:
        raise UserError(f"policy {text!r} could keep state between decisions; accepted: a @dataclass(frozen=True)")
    for each in fields(made):
        try:
            hash(getattr(made, each.name))
        except TypeError:
            raise UserError(
                f"policy {text!r} could keep state in its field {each.name!r}, which can change; accepted: values that "
                "cannot, such as numbers, texts, tuples and frozen dataclasses"
            ) from None
