"""The command line: words in, pictures out. One function per command, no scheduling logic of its own."""

from rlmux.cli.main import main

__all__ = ["main"]
