"""Environments that have the small server in place of vLLM and SGLang: a `python` that finds packages so named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

SMALL_SERVER = Path(__file__).with_name("small_server.py")
MODULES = {"vllm": "vllm/entrypoints/openai/api_server.py", "sglang": "sglang/launch_server.py"}
MODELS = {"vllm": "vllm/model_executor/models/registry.py", "sglang": "sglang/srt/models/qwen3.py"}
VERSIONS = {"vllm": "0.32.0", "sglang": "0.5.23"}


def make_environment(folder: Path, name: str, *, version: str | None = None, serves: str = "Qwen3ForCausalLM") -> str:
    """The path of an environment's python, in which `name` starts the small server.

    `version`: the small server answers as this version of vLLM, strictly; without it as the newest that it is like.
    """
    site = folder / "site"
    start = f"import runpy; runpy.run_path({str(SMALL_SERVER)!r}, run_name='__main__')\n"
    for path, text in ((MODULES[name], start), (MODELS[name], f"SERVED = {serves!r}\n")):
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
    information = site / f"{name}-{version or VERSIONS[name]}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version or VERSIONS[name]}\n"
    )
    versioned = f"\nexport SMALL_SERVER_VERSION={version}" if version and name == "vllm" else ""
    return make_python(folder, f"export PYTHONPATH={site}{versioned}")


def make_python(folder: Path, preparation: str = "") -> str:
    """A `python` that is this one, behind some lines of shell."""
    folder.mkdir(parents=True, exist_ok=True)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\n{preparation}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)


def misbehaving(**how: Any) -> tuple[str, ...]:
    """Arguments of a server's command that make it misbehave."""
    return ("--misbehave", json.dumps(how))
