"""Trains LoRA tenants of one base together: one forward and one backward of the base for the micro-batches of all.

    stage of a ─▶ Score ─┐                    ┌─▶ scores of a ─▶ Backward ─┐
    stage of b ─▶ Score ─┼─ one JointForward ─┼─▶ scores of b ─▶ Backward ─┼─ one backward ─▶ gradients of a, b, c
    stage of c ─▶ Score ─┘                    └─▶ scores of c ─▶ Backward ─┘

A round is one micro-batch of each tenant. A tenant's update is made when its own batch is whole, by its own optimizer.
Tenants compute one after another within the same call where rows may round differently together (micro-batches of few
rows, a mixture of experts) or gain nothing (micro-batches of many rows), and where bases differ.

Invariants: weights, moments and metrics of a tenant have the bits that they have alone, whatever the companions. An
error is that of one tenant: the others continue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlmux.core.errors import PipelineError, UserError
from rlmux.core.model import Stage
from rlmux.engines.adapters.shared_base import TenantBase
from rlmux.engines.train.datum_train import DatumTrainEngine
from rlmux.engines.train.joint_forward import JointForward, Rows
from rlmux.engines.train.stage_work import TrainWork
from rlmux.engines.train.state.trainer_state import TrainState
from rlmux.engines.train.train_engine import TorchTrainEngine
from rlmux.engines.train.update.router_loss import has_experts
from rlmux.engines.train.update.train_tensors import Backward, Score, deterministic_backward
from rlmux.engines.train.update.training_forward import TokenScores
from rlmux.rl.config import TrainingConfig
from rlmux.rl.memory.adapter_base import base_name
from rlmux.rl.origin import Origin
from rlmux.rl.types import TrainReport
from rlmux.rl.vocabulary import Vocabulary, load_vocabulary

_Engine = TypeVar("_Engine", TorchTrainEngine, DatumTrainEngine)


class JointTraining:
    """The tenants of one worker. See the module docstring.

    Tenants     add, add_model, remove
    Learning    run_stages, run_round, is_exact_by_rows
    """

    def __init__(self, device: str = "cpu", bases: Path | None = None) -> None:
        """`bases`: folder in shared memory where bases lie once for all workers, as in `TorchTrainEngine`."""
        self._device = device
        self._bases = bases
        self._tenants: dict[str, _Tenant] = {}

    @property
    def is_exact_by_rows(self) -> dict[str, dict[int, bool]]:
        """By tenant: whether its base is exact at each number of rows that was probed; empty for one that always
        computes alone."""
        return {
            name: {} if tenant.joint is None else tenant.joint.probe.measured for name, tenant in self._tenants.items()
        }

    # --- tenants --------------------------------------------------------------------------------------------

    def add(
        self, name: str, config: TrainingConfig, *, origin: Origin | None = None, vocabulary: Vocabulary | None = None
    ) -> TorchTrainEngine:
        """The engine of a new pipeline. Raises UserError for a config that cannot share a base."""
        vocabulary = load_vocabulary(config.model) if vocabulary is None else vocabulary

        def make(base: TenantBase) -> TorchTrainEngine:
            return TorchTrainEngine(config, vocabulary=vocabulary, device=self._device, origin=origin, base=base)

        return self._add(name, config, vocabulary.vocab_size, make)

    def add_model(self, name: str, config: TrainingConfig) -> DatumTrainEngine:
        """The engine of a new model that requests train. Raises UserError for a config that cannot share a base."""

        def make(base: TenantBase) -> DatumTrainEngine:
            return DatumTrainEngine(config, device=self._device, base=base)

        return self._add(name, config, load_vocabulary(config.model).vocab_size, make)

    def _add(
        self, name: str, config: TrainingConfig, vocab_size: int, make: Callable[[TenantBase], _Engine]
    ) -> _Engine:
        self._check(name, config)
        key = (base_name(config.model, config.model_seed), vocab_size, config.train.dtype)
        beside = [tenant for tenant in self._tenants.values() if tenant.base_key == key]
        bases = [tenant.base for tenant in beside]
        base = bases[0] if bases else TenantBase(config, vocab_size, device=self._device, bases=self._bases)
        engine = make(base)
        state = engine.state
        assert isinstance(state, TrainState), "checked above"
        is_checkpointed = config.train.activation_checkpointing
        joint = next(
            (tenant.joint for tenant in beside if tenant.config.train.activation_checkpointing == is_checkpointed), None
        )
        if joint is None and not has_experts(state.model.config):
            joint = JointForward(base, config.train)
        self._tenants[name] = _Tenant(config=config, engine=engine, state=state, base=base, base_key=key, joint=joint)
        return engine

    def _check(self, name: str, config: TrainingConfig) -> None:
        if name in self._tenants:
            raise UserError(f"{name!r} is a tenant already; accepted: another name")
        if config.adapter is None:
            raise UserError(f"pipeline {config.name}: a tenant has an adapter; accepted: a file with `adapter`")
        if config.train.num_workers != 1 or config.train.is_sharded:
            raise UserError(f"pipeline {config.name}: a tenant trains on one rank; accepted: train.workers: 1")

    def remove(self, name: str) -> None:
        """Drop a tenant; its base goes with its last tenant."""
        tenant = self._tenants.pop(name)
        tenant.base.release(tenant.state)

    # --- learning -------------------------------------------------------------------------------------------

    def run_stages(self, stages: Mapping[str, Stage], *, max_seconds: float) -> dict[str, TrainReport | Exception]:
        """Continue the stage of each tenant for at least one micro-batch, until `max_seconds` have passed.

        Returns the report of each, or the error that ended its stage. `seconds` of a report is the tenant's part of
        the time, by tokens.
        """
        results: dict[str, TrainReport | Exception] = {}
        works: dict[str, TrainWork] = {}
        for name, stage in stages.items():
            try:
                with self._pipeline(name).stage(stage) as work:
                    works[name] = TrainWork(requests=work.requests, stage=work, is_done=work.is_done)
            except Exception as error:  # whatever it is, it ends this tenant alone
                results[name] = error
        self._run(works, max_seconds)
        for name, done in works.items():
            try:
                with self._pipeline(name).stage(stages[name]) as work:
                    results[name] = work.report(done.tokens, done.seconds)
                    if done.error is not None:
                        raise done.error
            except Exception as error:  # whatever it is, it ends this tenant alone
                results[name] = error
        return results

    def _pipeline(self, name: str) -> TorchTrainEngine:
        engine = self._tenants[name].engine
        assert isinstance(engine, TorchTrainEngine), "a tenant of `add`"
        return engine

    def _run(self, works: Mapping[str, TrainWork], max_seconds: float) -> None:
        """Rounds until all are done, or until another round like the last would end after `max_seconds`."""
        started = perf_counter()
        elapsed_s = last_s = 0.0
        is_over = False
        while not is_over and (active := {name: work for name, work in works.items() if not work.is_over}):
            is_over = elapsed_s + last_s >= max_seconds
            tokens = [work.tokens for work in active.values()]
            self.run_round(active)
            last_s, elapsed_s = perf_counter() - started - elapsed_s, perf_counter() - started
            done = [work.tokens - before for work, before in zip(active.values(), tokens, strict=True)]
            for work, own in zip(active.values(), done, strict=True):
                work.seconds += last_s * own / max(1, sum(done))

    def run_round(self, works: Mapping[str, TrainWork]) -> None:
        """One micro-batch of each, whose results and errors the works then hold."""
        first = {name: score for name, work in works.items() if (score := work.take_score()) is not None}
        # Group by group: a joint model serves one forward until its backward.
        for names in self._groups(first):
            requests: dict[str, Score | Backward] = {name: first[name] for name in names}
            while requests:
                scores = {name: each for name, each in requests.items() if isinstance(each, Score)}
                backwards = {name: each for name, each in requests.items() if isinstance(each, Backward)}
                replies = {**self._answer_scores(scores), **self._answer_backwards(backwards)}
                following = {name: works[name].resume(reply) for name, reply in replies.items()}
                requests = {name: each for name, each in following.items() if each is not None}
            for name in names:
                self._tenants[name].forward = None

    def _groups(self, requests: Mapping[str, Score]) -> list[list[str]]:
        """The tenants that compute together: of one joint model, all with a gradient or none."""
        alike: dict[tuple[bool, int], list[str]] = {}
        for name, request in requests.items():
            alike.setdefault((request.with_gradient, id(self._tenants[name].joint)), []).append(name)
        groups: list[list[str]] = []
        for names in alike.values():
            joint = self._tenants[names[0]].joint
            places = [[place] for place in range(len(names))]
            if joint is not None:
                places = joint.groups([len(requests[name].batch.input_tokens) for name in names])
            groups += [[names[place] for place in each] for each in places]
        return groups

    # --- scores ---------------------------------------------------------------------------------------------

    def _answer_scores(self, requests: Mapping[str, Score]) -> Mapping[str, TokenScores | Exception]:
        """Scores of one group."""
        joint = self._tenants[next(iter(requests))].joint if len(requests) > 1 else None
        if joint is not None:
            try:
                return dict(zip(requests, self._score_together(joint, requests), strict=True))
            except (RuntimeError, PipelineError):
                pass  # Too large together, or an error of one tenant: alone it is raised again.
        return {name: self._alone(name, request) for name, request in requests.items()}

    def _score_together(self, joint: JointForward, requests: Mapping[str, Score]) -> list[TokenScores]:
        with_gradient = next(iter(requests.values())).with_gradient
        with torch.set_grad_enabled(with_gradient), ExitStack() as references:
            for name, request in requests.items():
                if request.uses_reference:
                    references.enter_context(self._tenants[name].state.reference_weights())
            found = joint.score([self._tenants[name].rows(request) for name, request in requests.items()])
        if not with_gradient:
            return found
        forwards = [_Forward.of(*pair) for pair in zip(requests.values(), found, strict=True)]
        for name, forward in zip(requests, forwards, strict=True):
            self._tenants[name].forward = forward
        return [
            TokenScores(logprobs=forward.leaf, entropies=scores.entropies)
            for forward, scores in zip(forwards, found, strict=True)
        ]

    def _alone(self, name: str, request: Score | Backward) -> Any:
        try:
            return self._tenants[name].state.answer(request)
        except Exception as error:  # whatever it is, it ends this tenant alone
            return error

    # --- gradients ------------------------------------------------------------------------------------------

    def _answer_backwards(self, requests: Mapping[str, Backward]) -> dict[str, Exception | None]:
        """Each loss goes back to the log-probs of its tenant alone; from there, all go back together."""
        replies: dict[str, Exception | None] = {}
        joined: dict[str, _Forward] = {}
        for name, request in requests.items():
            tenant = self._tenants[name]
            if tenant.forward is None:
                replies[name] = self._alone(name, request)
                continue
            try:
                replies[name] = None
                tenant.state.begin_gradient()
                with deterministic_backward():
                    request.loss.backward()  # type: ignore[no-untyped-call]
                joined[name] = tenant.forward
            except Exception as error:  # whatever it is, it ends this tenant alone
                replies[name] = error
        return {**replies, **self._go_back(joined)}

    def _go_back(self, forwards: dict[str, _Forward]) -> dict[str, Exception]:
        """The joint backward; one after another where memory is too small for it. Returns the errors."""
        try:
            _backward([(each.logprobs, each.leaf) for each in forwards.values()])
        except (RuntimeError, PipelineError):
            pass
        else:
            for name in forwards:
                self._tenants[name].state.end_gradient()
            return {}
        leaves = {name: (each.request, each.leaf) for name, each in forwards.items()}
        forwards.clear()  # the joint graph is freed before anything is computed again
        for name in leaves:
            self._tenants[name].forward = None
        errors = {name: self._go_back_alone(name, *leaf) for name, leaf in leaves.items()}
        return {name: error for name, error in errors.items() if error is not None}

    def _go_back_alone(self, name: str, forward: Score, leaf: Tensor) -> Exception | None:
        state = self._tenants[name].state
        try:
            state.begin_gradient()
            scores = state.answer(forward)
            assert isinstance(scores, TokenScores)
            _backward([(scores.logprobs, leaf)])
            state.end_gradient()
        except Exception as error:  # whatever it is, it ends this tenant alone
            return error
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Forward:
    """A tenant's part of a joint forward that waits for its gradient."""

    request: Score
    """The request that it answers."""
    logprobs: Tensor
    """Log-probs [R] in the graph of the joint forward."""
    leaf: Tensor
    """The same log-probs in the graph of the tenant's loss, which leaves their gradient here."""

    @classmethod
    def of(cls, request: Score, scores: TokenScores) -> _Forward:
        return cls(request=request, logprobs=scores.logprobs, leaf=scores.logprobs.detach().requires_grad_())


def _backward(scored: Sequence[tuple[Tensor, Tensor]]) -> None:
    """From log-probs, and the leaves that have their gradients."""
    reached = [(logprobs, leaf.grad) for logprobs, leaf in scored if leaf.grad is not None]
    if reached:
        tensors, gradients = zip(*reached, strict=True)
        with deterministic_backward():
            torch.autograd.backward(tensors, gradients)


@dataclass(slots=True, kw_only=True)
class _Tenant:
    """One tenant, and its micro-batch under way."""

    config: TrainingConfig
    """The tenant's own."""
    engine: TorchTrainEngine | DatumTrainEngine
    """What `add` or `add_model` returned."""
    state: TrainState
    """The engine's tensors."""
    base: TenantBase
    """The frozen base."""
    base_key: tuple[object, ...]
    """What determines the base's tensors."""
    joint: JointForward | None
    """The model of all tenants; None for a tenant that always computes alone."""
    forward: _Forward | None = None
    """The joint forward of the present micro-batch; None where the tenant computes alone."""

    def rows(self, request: Score) -> Rows:
        """The tenant's part of a joint forward."""
        model, train = self.state.model, self.config.train
        return Rows(model=model, train=train, batch=request.batch, temperature=request.temperature)
