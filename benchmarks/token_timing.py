"""Does the time of a refusal say whether a token's id is known?

    python benchmarks/token_timing.py [--samples 10000] [--tokens 100] [--seed 0]

A server of this process shows an empty folder with so many tokens. Over one connection it is asked, in random order,
with tokens of a known id and a wrong secret, and with tokens of an id that there is not; each as often as `--samples`.
Of the server's own check alone (no HTTP) the same.

    median_us           of a known id, of an unknown one
    distance, p         of the two samples by Kolmogorov and Smirnov: the largest distance of their distributions, and
                        how often chance alone gives one as large; goal: p of 0.05 or more
    within              the same for known ids against known ids: what this machine's noise gives
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from rlmux.service.dashboard import tokens
from rlmux.service.dashboard.access import Access, Limits
from rlmux.service.dashboard.app import Dashboard
from rlmux.service.listening import Listening
from rlmux.service.server import Server

NO_LIMIT = Limits(requests_per_s=1e9, burst=1e9, logins_per_minute=1e9)


def samples(
    ask: Callable[[str], object], kinds: dict[str, Callable[[], str]], num: int, chance: random.Random
) -> dict[str, list[float]]:
    """Microseconds of each answer, by kind of token; kinds take turns at random.

    All tokens are made first: what makes one of a known id leaves other things in the processor's caches.
    """
    order = [(kind, kinds[kind]()) for kind in kinds for _ in range(num)]
    chance.shuffle(order)
    spent: dict[str, list[float]] = {kind: [] for kind in kinds}
    for kind, token in order:
        begin = time.perf_counter_ns()
        ask(token)
        spent[kind].append((time.perf_counter_ns() - begin) / 1e3)
    return spent


def kolmogorov_smirnov(one: list[float], other: list[float]) -> tuple[float, float]:
    """(largest distance of the two empirical distributions, its two-sided p by the asymptotic series)."""
    first, second = np.sort(one), np.sort(other)
    both = np.concatenate([first, second])
    at = [np.searchsorted(each, both, side="right") / len(each) for each in (first, second)]
    distance = float(np.abs(at[0] - at[1]).max())
    root = np.sqrt(len(first) * len(second) / (len(first) + len(second)))
    scaled = (root + 0.12 + 0.11 / root) * distance
    number = np.arange(1, 101)
    p = 2.0 * float(np.sum((-1.0) ** (number - 1) * np.exp(-2.0 * number**2 * scaled**2)))
    return distance, min(max(p, 0.0), 1.0) if scaled > 0.2 else 1.0


def row(where: str, spent: dict[str, list[float]]) -> dict[str, Any]:
    distance, p = kolmogorov_smirnov(spent["known"], spent["unknown"])
    _, within_p = kolmogorov_smirnov(spent["known"], spent["known too"])
    return {
        "where": where,
        "samples": len(spent["known"]),
        "known_us": round(statistics.median(spent["known"]), 2),
        "unknown_us": round(statistics.median(spent["unknown"]), 2),
        "distance": round(distance, 4),
        "p": round(p, 3),
        "p_within": round(within_p, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    chance = random.Random(asked.seed)
    with tempfile.TemporaryDirectory(prefix="rlmux-tokens-") as name:
        folder = Path(name)
        now = time.time()
        ids = [tokens.add(folder, "ann", ["read"], days=1.0, now=now).split("_")[1] for _ in range(asked.tokens)]

        def unknown() -> str:
            return tokens.make_token()[0]

        def known() -> str:
            return "_".join(["rlx", chance.choice(ids), unknown().split("_")[2]])

        kinds = {"known": known, "known too": known, "unknown": unknown}
        access = Access()
        access.watch(folder)
        rows = [row("the check", samples(access.of_token, kinds, asked.samples, chance))]
        server = Server(Listening())
        dashboard = Dashboard(folder, server, limits=NO_LIMIT)
        server.start()
        dashboard.start()
        try:
            with httpx.Client(base_url=f"{server.url}/api/v1", timeout=60) as client:

                def refused(token: str) -> None:
                    answer = client.get("/lanes", headers={"Authorization": f"Bearer {token}"})
                    assert answer.status_code == 401, answer.text

                for kind in kinds.values():
                    for _ in range(200):
                        refused(kind())
                rows.append(row("a request", samples(refused, kinds, asked.samples, chance)))
        finally:
            server.close()
            dashboard.close()
    if asked.json:
        sys.exit(print(json.dumps(rows)))
    for each in rows:
        print("  ".join(f"{key} {value}" for key, value in each.items()))


if __name__ == "__main__":
    main()
