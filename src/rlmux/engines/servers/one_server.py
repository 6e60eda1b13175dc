"""One server, started or found: single requests, memory, end. The base of the rollout engine.

A module of its own: measuring and the engine both build on it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from uuid import uuid4

from rlmux.core.errors import PipelineError, RlmuxError
from rlmux.engines.servers.dialect import Dialect
from rlmux.engines.servers.generation_requests import Requests
from rlmux.engines.servers.gpu_memory import GpuMemory
from rlmux.engines.servers.http_connection import ServerAnswerError, ServerConnection, ServerGoneError
from rlmux.engines.servers.process import ServerProcess
from rlmux.engines.servers.settings import Piece, Sampling, ServerSettings
from rlmux.rl.config import EngineConfig

MAX_LOST = 5
"""Most requests of one trajectory that the server may lose in a row without a new token."""
_EVENT_LIMIT_S = 120.0
"""Longest wait for a request's next event."""
_BUSY_LIMIT_S = 60.0
_POLL_S = 0.05
_CANARY_TOKENS = 2
WAKE_LIMIT_S = 120.0
"""Longest wait for a sleeping server to free memory, or a waking one to answer."""


class OneServer:
    """A server and its process, where it is this process's own."""

    def __init__(
        self,
        dialect: Dialect,
        settings: ServerSettings,
        engine: EngineConfig,
        *,
        on_wait: Callable[[], None],
        gpus: GpuMemory | None,
    ) -> None:
        """Starts the server, or finds it at `engine.url`. Raises ServerGoneError, and UserError for another kind."""
        self.dialect = dialect
        self._settings = settings
        self._engine = engine
        self._on_wait = on_wait
        self._gpus = gpus
        self._prefix = uuid4().hex[:8]
        self._is_held = self._is_asleep = False
        self._num_requests = 0
        self.weights = "0"
        """Name of the weights that it samples with, another one after each change."""
        self.adapter = ""
        """The adapter that requests name; empty: the base alone."""
        self._process: ServerProcess | None = None
        try:
            self._connect()
        except RlmuxError:
            self.close()
            raise

    def _connect(self) -> None:
        """Start or find the server, and check its kind."""
        if self._engine.python is not None:
            self._process = ServerProcess(self.dialect, self._engine.python, self._settings)
        url = self._process.url if self._process else str(self._engine.url)
        self.server = ServerConnection(url, busy_limit_s=_BUSY_LIMIT_S)
        if self._process is not None:
            self._process.wait_until_ready(self.server, self._engine.start_limit_s, self._on_wait)
        self.server_version = self.dialect.version(self.server)
        self.requests = Requests(self.dialect, self.server, limit_s=_EVENT_LIMIT_S)

    @property
    def num_slots(self) -> int:
        """Sequences that the server decodes at once."""
        return self._settings.num_slots

    @property
    def dtype(self) -> str:
        """Dtype of the server's sampling."""
        return self._settings.dtype

    @property
    def starts_empty(self) -> bool:
        """Whether it was started with random weights."""
        return self._settings.starts_empty

    @property
    def has_adapter(self) -> bool:
        """Whether what it gets is an adapter beside a base that stays."""
        return self._settings.adapter_rank > 0

    @property
    def can_restart(self) -> bool:
        """Whether this process started the server."""
        return self._process is not None

    def last_words(self) -> str:
        """The server's last output, which also goes to this process's output."""
        return self._process.last_words() if self._process is not None else ""

    def restart(self, *, starts_empty: bool = False) -> None:
        """Start the server anew, with the weights of its folder. Raises PipelineError for one of others."""
        if self._process is None:
            raise PipelineError(
                f"{self.dialect.name} at {self._engine.url} does not take new weights, as its probe found; accepted: "
                "rollout.engine.python, so that it can be started anew for each version"
            )
        folder = self._settings.folder
        aside = folder.rename(folder.with_name(f"{folder.name}-aside"))  # the end of a server removes its folder
        self._process.end()
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
        self._settings = replace(self._settings, starts_empty=starts_empty)
        self._connect()
        self._is_held = self._is_asleep = False
        self.adapter = ""

    def close(self) -> None:
        """End the server, if it is this process's own, and remove its folder."""
        if self._process is not None:
            self._process.end()
        shutil.rmtree(self._settings.folder, ignore_errors=True)

    def sample(self, tokens: Sequence[int], *, seed: int, max_tokens: int) -> Piece:
        """Run a single request to its end, with no other active; a lost request is repeated.

        Raises ServerGoneError after too many lost requests, ServerAnswerError for a wrong number of tokens.
        """
        for _ in range(MAX_LOST + 1):
            piece = self._sample_once(tokens, seed=seed, max_tokens=max_tokens)
            if piece.finish not in (None, "abort"):
                break
        else:
            raise ServerGoneError(f"{self.dialect.name} lost the same request {MAX_LOST + 1} times")
        if not len(piece.tokens) == len(piece.logprobs) == max_tokens:
            raise ServerAnswerError(
                f"{self.server.url}: {max_tokens} tokens were requested, {len(piece.tokens)} came with "
                f"{len(piece.logprobs)} log-probs; accepted: a server of this model"
            )
        return piece

    def _sample_once(self, tokens: Sequence[int], *, seed: int, max_tokens: int) -> Piece:
        sampling = Sampling(
            request_id=self.next_request_id(),
            tokens=tokens,
            seed=seed,
            temperature=1.0,
            max_tokens=max_tokens,
            stop_tokens=(),
            weights=self.weights,
            adapter=self.adapter,
        )
        stream = self.server.stream(
            self.dialect.generate_path(), self.dialect.generate_body(sampling), limit_s=_EVENT_LIMIT_S
        )
        pieces = list(self.dialect.read_events(iter(stream)))
        return Piece(
            tokens=[token for piece in pieces for token in piece.tokens],
            logprobs=[logprob for piece in pieces for logprob in piece.logprobs],
            finish=next((piece.finish for piece in pieces if piece.finish is not None), None),
            versions=[version for piece in pieces for version in piece.versions],
        )

    def memory_bytes(self) -> float:
        """Device memory of the server's processes: of its GPUs, or of the host on a core; 0 where it is unknown."""
        if self._gpus is not None:
            return self._gpus.used_by(self._process.pids() if self._process is not None else ())
        return self._process.memory_bytes() if self._process is not None else 0.0

    def next_request_id(self) -> str:
        self._num_requests += 1
        return f"rlmux-{self._prefix}-{self._num_requests}"

    def _sample_canary(self, vocab_size: int) -> Piece:
        """A fixed prompt, sampled with a fixed seed."""
        tokens = [token % vocab_size for token in (1, 2, 3)]
        return self.sample(tokens, seed=1, max_tokens=_CANARY_TOKENS)

    def _wait_for_memory(self, at_most: float) -> None:
        """Wait for freed memory: a 200 proves only that the endpoint returned."""
        until_s = time.monotonic() + WAKE_LIMIT_S
        while self.memory_bytes() > at_most:
            if time.monotonic() >= until_s:
                raise PipelineError(
                    f"{self.dialect.name} keeps {self.memory_bytes() / 1e9:.2f} GB though it sleeps; it was to keep "
                    f"at most {at_most / 1e9:.2f}"
                )
            self._on_wait()
            time.sleep(_POLL_S)

    def resident_bytes(self) -> int:
        """Device bytes that the server holds."""
        return int(self.memory_bytes())
