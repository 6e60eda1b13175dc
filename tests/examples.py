"""How many examples hypothesis tries: a fifth of them in `make test`, all in `make prove`."""

from __future__ import annotations

import os


def examples(num: int) -> int:
    """What a test that is proved by so many examples tries now."""
    return num if os.environ.get("RLMUX_EXAMPLES") == "all" else max(2, num // 5)
