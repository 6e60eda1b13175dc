"""The sessions of one pipeline, between its programs and its rollout: what `Conversations` is to environments.

    begin(step's episodes) ──▶ a Session and a program for each ──(gateway thread)──▶ questions ─┐
    send_turns ─▶ answers                                                                        │
    collect ──▶ waits until a session has a question that its engine can go on with, or is over ◀┘
    reply_to ─▶ where the engine goes on; None: the session is over

Invariant: sessions are read and changed under one lock, by the thread of the pipeline's environment and by that of the
gateway; what comes out is a function of the questions.
"""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rlmux.reaper import server_command
from rlmux.rl.agents.chat_tokens import ChatTokens
from rlmux.rl.agents.gateway import Gateway
from rlmux.rl.agents.outcomes import Outcome
from rlmux.rl.agents.programs import Programs, Trial, trial_seed
from rlmux.rl.agents.session import Ask, Session
from rlmux.rl.config import TrainingConfig
from rlmux.rl.episode import Episode
from rlmux.rl.types import FinishedTurn, TrajectoryId, TurnReply
from rlmux.rl.vocabulary import Vocabulary

_LINGER_S = 0.001
"""Seconds to wait on after the first session is ready: others are often about to be."""


@dataclass(slots=True, kw_only=True)
class _Live:
    """A session and the program that asks."""

    session: Session
    work: Future[Outcome] | None = None
    outcome: Outcome | None = None


class SessionBoard:
    """Owns sessions and programs from the first step on."""

    def __init__(
        self, config: TrainingConfig, vocabulary: Vocabulary, code_folder: Path | None, on_answer: Callable[[], None]
    ) -> None:
        """`code_folder`: where a command's files are looked for first. `on_answer`: called when sessions advance."""
        self._config, self._vocabulary = config, vocabulary
        self._chats = ChatTokens(vocabulary)
        self._on_answer = on_answer
        self._live: dict[TrajectoryId, _Live] = {}
        self._changed = threading.Condition()
        folder = Path(tempfile.mkdtemp(prefix="rlmux-programs-"))
        self._remover = subprocess.Popen(
            server_command(folder, ["sleep", "infinity"]), stdin=subprocess.PIPE, start_new_session=True
        )
        """Removes the folder when this process ends, however it does."""
        self._gateway = Gateway(config.task.model_name or config.name, folder)
        self._programs = Programs(config, self._gateway, folder, code_folder)

    def begin(self, episodes: Iterable[Episode]) -> None:
        """Start the programs of new episodes, in their order."""
        for episode in episodes:
            request = episode.request
            session = Session(
                request,
                self._vocabulary,
                self._chats,
                max_prompt_tokens=self._config.rollout.max_prompt_tokens,
                max_turns=self._config.task.max_turns,
            )
            episode.session = session
            live = self._live[request.id] = _Live(session=session)
            trial = Trial(
                id=request.id,
                prompt=episode.prompt,
                seed=trial_seed(self._config.seed, request.id),
                put=partial(self._put, session),
                note_refusal=partial(self._note_refusal, session),
                restart=partial(self._restart, session),
                state=partial(self._state, session),
            )
            live.work = asyncio.run_coroutine_threadsafe(self._live_through(live, trial), self._gateway.loop)

    async def _live_through(self, live: _Live, trial: Trial) -> Outcome:
        outcome = Outcome(kind="failed", text="its program could not be started")
        try:
            outcome = await self._programs.run(trial)
        except Exception as error:  # a fault of ours must not hang the step
            outcome = Outcome(kind="failed", text=" ".join(f"{type(error).__name__}: {error}".split()))
        finally:
            with self._changed:
                live.session.end()
                live.outcome = outcome
                self._changed.notify_all()
        return outcome

    # --- from the gateway's thread ----------------------------------------------------------------------------

    def _put(self, session: Session, ask: Ask) -> None:
        with self._changed:
            session.ask(ask)
            self._changed.notify_all()

    def _note_refusal(self, session: Session, text: str) -> None:
        with self._changed:
            session.refusal = session.refusal or text

    def _restart(self, session: Session) -> None:
        with self._changed:
            session.restart()

    def _state(self, session: Session) -> tuple[int, str | None, str | None]:
        with self._changed:
            return session.num_asks, session.limit, session.refusal

    # --- from the environment's thread ------------------------------------------------------------------------

    def send_turns(self, turns: Sequence[tuple[FinishedTurn, Episode]]) -> None:
        """Take what engines sampled, and which sessions they wait for."""
        with self._changed:
            for turn, _ in turns:
                self._live[turn.id].session.take_turn(turn)

    def collect(self, patience_s: float | None) -> None:
        """Wait for the first session that is ready (None: however long), or for `patience_s` seconds."""
        with self._changed:
            is_any = self._changed.wait_for(self._is_any_ready, patience_s)
        if is_any:
            time.sleep(_LINGER_S)
            self._on_answer()

    def _is_any_ready(self) -> bool:
        return any(
            live.session.has_reply or (live.outcome is not None and live.session.is_engine_waiting)
            for live in self._live.values()
        )

    def is_pending(self, turn: FinishedTurn) -> bool:
        """Whether the engine that sent this turn has to wait on."""
        with self._changed:
            live = self._live.get(turn.id)  # None: a late turn of a step that is over
            return live is not None and live.outcome is None and not live.session.has_reply

    def reply_to(self, turn: FinishedTurn, episode: Episode) -> TurnReply | None:
        """Where the engine goes on; None: the session is over, and the episode has its outcome."""
        with self._changed:
            live = self._live[turn.id]
            if live.outcome is None:
                return live.session.next_reply()
            episode.outcome = live.outcome
            live.session.is_engine_waiting = False
            return None

    def drop_step(self, step: int) -> None:
        """End what is left of a step that is over."""
        for id in [id for id in self._live if id.step == step]:
            live = self._live.pop(id)
            if live.work is not None:
                live.work.cancel()

    def close(self) -> None:
        """End all programs."""
        for step in {id.step for id in self._live}:
            self.drop_step(step)
        self._gateway.close()
        self._remover.communicate()
