"""Every how-to is typed as a reader types it: in an empty folder, from top to bottom, until it ends.

    page ── pieces ─▶ Piece   a file with a name      ─▶ written
                              a command               ─▶ typed; exit code 0, and what the page says comes out
                              an excerpt              ─▶ its syntax is read
                              NOT_TYPED has a reason  ─▶ left out

A command that serves is left running until the next server starts, as in a terminal of its own. Each new page and
each new command is typed, or gets a reason here.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from tests.test_docs_commands import PAGES, ROOT
from tests.waiting import until

LIMIT_S = 400
PORT = 7460
"""The port of the pages; a test has one of its own."""
HOW_TOS = ("README.md", "docs/get-started.md", *sorted(page for page in PAGES if page.startswith("docs/how-to/")))
NOT_HERE: Mapping[str, str] = {
    "docs/how-to/kubernetes.md": "Docker and Kubernetes",
    "docs/how-to/many-machines.md": "machines of a Ray cluster; tests/runtime has several Ray nodes on one",
    **{
        f"docs/how-to/{name}.md": f"an environment with {name}; `make test-{name}`"
        for name in ("verl", "areal", "skyrl", "openrlhf")
    },
    "docs/how-to/vllm.md": "an environment with vLLM; tests/runtime/test_real_engine.py has it where there is one",
}
"""Pages of which nothing can be typed here, and what that would take. Their files are read all the same."""
NOT_TYPED: Mapping[str, str] = {
    r"make (?!demo)|python3 -m venv|pip install (torch|\")": "a clone and an index; tests/test_wheel.py has both",
    r".*nvidia-cuda-mps-control|rlmux (profile|run) FILE": "a GPU with MPS",
    r"make demo": "the same demo, by the checkout's own environment",
    r"(RLMUX_JOB=\w )?python examples/own_trl\.py|.*own_trl": "TRL; `make test-trl`",
    r"rlmux (estimate a\.log|plan jobs)": "logs of another trainer; tests/cli/test_estimate.py has some",
    r"rlmux broker pools\.yaml --listen": "an address of this machine's network",
    r"python -m tinker_cookbook|  loss_fn=": "the cookbook; `make test-tinker`",
    r"tinker checkpoint download": "weights of a client; tests/service/tinker downloads some",
    r"rlmux budget \S+ key-": "a client that has computed; tests/service/tinker sets its budget",
    r"client[ .]": "the SDK of OpenAI; tests/service/rollouts speaks its API",
    r".*--tls-cert": "a certificate; tests/service/test_http_server.py has one",
    r"rlmux simulate weave": "minutes of a core; tests/test_docs_runs.py runs it",
    r"sky ": "SkyPilot",
}
"""Beginnings of lines that are not typed, and what they would take."""
TAKES_FILES_OF: Mapping[str, str] = {"docs/how-to/slurm-skypilot.md": "docs/get-started.md"}
"""Pages whose `two.yaml` is the one of another page."""
SAYS: Mapping[str, str] = {
    r"rlmux demo$": r"reverse +8 [^\n]*finished\nsort +8 [^\n]*finished",
    r"rlmux init$": r"rlmux\.yaml",
    r"rlmux check": r": ok: ",
    r"rlmux doctor": r"missing +GPUs|ok +GPUs",
    r"rlmux demo --copy": r"examples in examples",
    r"rlmux serve(?! runs/two)": r"submit: rlmux submit",
    r"rlmux serve examples/serve/tiny": r"export TINKER_BASE_URL=\S+\nexport TINKER_API_KEY=tml-anything",
    r"rlmux broker": r"export RLMUX_BROKER=unix:",
    r"rlmux run mine/two\.yaml --out runs/two": r"double +40 [^\n]*exact +finished\nlast +40 [^\n]*exact +finished",
    r"rlmux compare": r"solo +\S+ +1 [^\n]*yes\nrollmux [^\n]*yes",
    r"rlmux stop runs/open": r"rlmux resume runs/open",
    r"rlmux token add": r"submit",
    r"RLMUX_JOB=a python examples/own_trainer": r"weights \w{64}",
}
"""What comes out of a command, by the pages."""
SHORTER: Mapping[str, str] = {
    r"rlmux demo$|rlmux compare examples/": " --set defaults.steps=8 --set defaults.sft_warmup.updates=8",
}
"""What is added to commands of a minute and more."""
SERVES = re.compile(r"rlmux (serve|broker)\b|rlmux run .*--keep-open")
SAVED = re.compile(r"[Ss]ave (?:it|this)\b[^`]*(?:folder\s+`(\w+)`\s+)?as `([\w.]+)`")
NAMED = re.compile(r"# ([\w.]+\.(?:yaml|py))\n")


class Piece(NamedTuple):
    """Something that a page asks its reader to do."""

    text: str
    name: str = ""
    """The file that it is; "" for a command or an excerpt."""
    language: str = ""
    """Of a file or an excerpt; "" for a command."""


def pieces(page: str) -> Iterator[Piece]:
    """What the page asks for, in its order."""
    folder, before = "", ""
    for language, fenced, indented in re.findall(
        r"^ *```(\w*)\n(.*?)^ *```|((?:^    \S[^\n]*\n|^ {6,}\S[^\n]*\n)+)", PAGES[page], re.MULTILINE | re.DOTALL
    ):
        text = fenced or indented
        start = PAGES[page].index(text)
        before = PAGES[page][:start].rpartition("```\n")[2]
        if language in ("yaml", "python", "bash"):
            saved, named = SAVED.search(before), NAMED.match(text)
            folder = (saved and saved[1]) or folder
            name = str(Path(folder, saved[2])) if saved else named[1] if named else ""
            yield Piece(text, name, language)
        elif (lines := commands_in(text)) and is_command(lines[0]):
            yield from map(Piece, filter(None, lines))


def commands_in(text: str) -> list[str]:
    """Lines of a block, those that end in a backslash joined with the next."""
    joined = re.sub(r"\\\n\s*", "", text)
    return [line.partition("  #")[0].strip() for line in joined.splitlines()]


def is_command(line: str) -> bool:
    """Whether a block that begins with this line is typed: others are output, pictures, other machines' shells."""
    words = "rlmux|python3?|pip|make|export|cd|tinker|sky|client|nvidia-cuda-mps-control|ray|docker|kubectl|sh|bash"
    return re.match(rf"([A-Z_]+=\S+ )?({words})[ .]", line) is not None


def reason(line: str) -> str:
    """Why a line is not typed; "" for one that is."""
    return next((why for beginning, why in NOT_TYPED.items() if re.match(beginning, line)), "")


class Reader:
    """A reader of one page: a folder, a shell, and a terminal for the server."""

    def __init__(self, folder: Path, page: str) -> None:
        self.folder, self.port = folder, free_port()
        self._shell_folder = folder
        self._server: subprocess.Popen[str] | None = None
        self._last = ""
        tools = folder.parent / "bin"
        tools.mkdir()
        site = folder.parent / "site"
        python = f'exec {shlex.quote(sys.executable)} "$@"'
        options = f"--quiet --no-deps --no-build-isolation --no-index --target {shlex.quote(str(site))}"
        self.requeued = folder.parent / "requeued"
        for name, line in {
            "python": python,
            "rlmux": python.replace('"$@"', '-m rlmux "$@"'),
            "pip": python.replace('"$@"', f'-m pip install {options} "${{@:2}}"'),
            "scontrol": f'echo "$@" >> {shlex.quote(str(self.requeued))}',
        }.items():
            (tools / name).write_text(f"#!/bin/bash\n{line}\n", encoding="utf-8")
            (tools / name).chmod(0o755)
        path = [str(site), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RLMUX_TOKEN", "RLMUX_BRO"))}
        self.environment = kept | {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(path),
            "XDG_STATE_HOME": str(folder.parent / "state"),
            "BROWSER": "true",
        }
        if other := TAKES_FILES_OF.get(page):
            for piece in filter(lambda piece: piece.name, pieces(other)):
                self.write(piece)
            self.type("python mine/rows.py && mv mine/* .")

    def write(self, piece: Piece) -> None:
        path = self.folder / piece.name
        path.parent.mkdir(exist_ok=True)
        path.write_text(piece.text, encoding="utf-8")

    def type(self, line: str) -> None:
        said = self._serve(line) if SERVES.match(line) else self._run(line)
        for beginning, comes in SAYS.items():
            if re.match(beginning, line):
                assert re.search(comes, said), f"{line}: {comes} is not in\n{said[-3000:]}"

    def _run(self, line: str) -> str:
        """Run a line to its end in the reader's shell, which keeps variables and folder."""
        if line.startswith("export RLMUX_TOKEN="):  # another person's shell
            self.environment.pop("RLMUX_TOKEN_FILE", None)
            self._shell_folder = self.folder
        typed = self._here(line)
        shell = f"{typed}\ncode=$?\nenv -0 > {shlex.quote(str(self.folder.parent / 'env'))}; exit $code"
        done = subprocess.run(
            ["bash", "-c", shell],
            cwd=self._shell_folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, (
            f"{typed} ended with {done.returncode}:\n{done.stdout[-1000:]}{done.stderr[-2000:]}"
        )
        entries = (self.folder.parent / "env").read_text(encoding="utf-8").split("\0")
        self.environment = dict(entry.split("=", 1) for entry in entries if "=" in entry)
        self._shell_folder = Path(self.environment.pop("PWD"))
        if done.stdout.strip():
            self._last = done.stdout.strip().splitlines()[-1]
        return done.stdout + done.stderr

    def _serve(self, line: str) -> str:
        """Start a server, and wait until it says that it is there."""
        self.end_server()
        typed = self._here(line)
        if line.startswith("rlmux serve"):
            typed += f" --listen 127.0.0.1:{self.port}"
        log = self.folder.parent / "server.log"
        with log.open("w", encoding="utf-8") as file:
            self._server = subprocess.Popen(
                ["bash", "-c", f"exec {typed}"],
                cwd=self._shell_folder,
                env=self.environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
            )

        def said() -> str:
            return log.read_text(encoding="utf-8")

        ready = {"rlmux broker": "export RLMUX_BROKER", "rlmux run": ": step "}
        sign = ready.get(" ".join(line.split()[:2]), "dashboard: " if "serve runs/" in line else "submit: ")
        until(lambda: sign in said(), f"{typed} is there", seen=said, process=self._server, poll_s=0.1)
        return said()

    def end_server(self) -> None:
        if self._server is not None and self._server.poll() is None:
            self._server.send_signal(signal.SIGINT)  # Ctrl-C in its terminal
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._server.wait(60)
            self._server.kill()
        self._server = None

    def close(self) -> None:
        """End what goes on by itself: a run that is open, lanes."""
        self.end_server()
        for log in [*self.folder.rglob("run.db"), *self.folder.parent.glob("state/**/run.db")]:
            subprocess.run(
                [sys.executable, "-m", "rlmux", "stop", str(log.parent)], env=self.environment, capture_output=True
            )

    def _here(self, line: str) -> str:
        """The line in its short form, with this test's port and folder, and the token that was printed last."""
        line = line.replace(f"127.0.0.1:{PORT}", f"127.0.0.1:{self.port}")
        line += next((words for beginning, words in SHORTER.items() if re.match(beginning, line)), "")
        return line.replace("/home/you", str(self.folder)).replace("=TOKEN", f"={self._last}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def reader(request: pytest.FixtureRequest) -> Iterator[Reader]:
    with tempfile.TemporaryDirectory(prefix="rlmux-", dir="/tmp") as room:  # short, as a socket's name has to be
        folder = Path(room, "empty")
        folder.mkdir()
        made = Reader(folder, request.node.callspec.params["page"])
        try:
            yield made
        finally:
            made.close()


def test_each_reason_is_one_of_a_line_and_each_page_without_a_run_exists():
    lines = [piece.text for page in HOW_TOS if page not in NOT_HERE for piece in pieces(page) if not piece.language]
    assert [begins for begins in NOT_TYPED if not any(re.match(begins, line) for line in lines)] == []
    assert NOT_HERE.keys() <= set(HOW_TOS)
    assert [says for says in SAYS if not any(re.match(says, line) for line in lines)] == []


@pytest.mark.parametrize("page", HOW_TOS)
def test_the_excerpts_of_a_page_are_read_and_what_it_types_is_found(page):
    found = list(pieces(page))
    for piece in found:
        if piece.language == "yaml":
            assert list(yaml.safe_load_all(piece.text))
        elif piece.language == "python":
            compile(piece.text, page, "exec")
    assert page in NOT_HERE or any(not piece.language and not reason(piece.text) for piece in found)


@pytest.mark.slow
@pytest.mark.timeout(4 * LIMIT_S)
@pytest.mark.parametrize("page", [page for page in HOW_TOS if page not in NOT_HERE])
def test_a_page_is_typed_to_its_end_in_an_empty_folder(page, reader):
    for piece in pieces(page):
        if piece.name:
            reader.write(piece)
        elif not piece.language and not reason(piece.text):
            reader.type(piece.text)


@pytest.mark.slow
@pytest.mark.timeout(4 * LIMIT_S)
@pytest.mark.parametrize("page", ["docs/how-to/slurm-skypilot.md"])
def test_the_slurm_script_puts_a_stopped_run_back_in_the_queue_and_resumes_it(page, reader):
    (script,) = [piece.text for piece in pieces(page) if piece.language == "bash"]
    environment = reader.environment | {"SLURM_SUBMIT_DIR": str(reader.folder), "SLURM_JOB_ID": "7"}
    started = {"cwd": reader.folder, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(["bash", "-c", script], text=True, **started) as job:
        assert job.stdout is not None
        lines = iter(job.stdout.readline, "")
        assert any(re.search(r"step \d+/40", line) for line in lines)
        job.terminate()
        rest = list(lines)
    assert job.returncode == 130, rest
    assert reader.requeued.read_text(encoding="utf-8") == "requeue 7\n"
    said = subprocess.run(["bash", "-c", script], text=True, timeout=LIMIT_S, check=True, **started).stdout
    assert re.search(r"double +40 .*finished\n *last +40 .*finished", said), said[-2000:]
    assert reader.requeued.read_text(encoding="utf-8") == "requeue 7\n"
