"""What a permit costs by either door of the broker: `rlmux.share` over its unix socket, and the time-slice protocol.

    python benchmarks/permit_doors.py                      a few seconds
    python benchmarks/permit_doors.py --turns 1000 --json

A broker in a process of its own, one program that is alone there: the time of taking a pool and giving it back, with
nothing in between. Each turn is two commits of the broker's log.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

DOORS = ("rlmux.share", "gRPC")


def turns_of(door: str, addresses: dict[str, str]) -> Callable[[], None]:
    """One turn of a program that came in by this door."""
    if door == "rlmux.share":
        from rlmux import share

        os.environ["RLMUX_BROKER"] = addresses["RLMUX_BROKER"]
        job = share.join("share", pools={"train": "gpu0"})

        def turn() -> None:
            with job.phase("train"):
                pass

        return turn
    import grpc

    from rlmux.broker.grpc_messages import MESSAGES, SERVICES

    channel = grpc.insecure_channel(addresses["TIMESLICE_ORCH_ADDR"])
    calls = [
        (
            channel.unary_unary(
                f"/{SERVICES[0]}/{name}",
                request_serializer=MESSAGES[f"{name}Request"].SerializeToString,
                response_deserializer=MESSAGES[f"{name}Response"].FromString,
            ),
            MESSAGES[f"{name}Request"](job_id="grpc", group_id="gpu0"),
        )
        for name in ("Acquire", "Yield")
    ]

    def turn_by_grpc() -> None:
        for call, request in calls:
            assert call(request).success

    return turn_by_grpc


def measure(turn: Callable[[], None], num_turns: int) -> list[float]:
    """Seconds of each turn; the first ones are not counted."""
    seconds = []
    for _ in range(num_turns + 20):
        begin_s = time.perf_counter()
        turn()
        seconds.append(time.perf_counter() - begin_s)
    return seconds[20:]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=500)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "broker.yaml"
        file.write_text("cluster: {pools: {gpu0: {phase: both}}}\n")
        command = [
            sys.executable,
            "-m",
            "rlmux",
            "broker",
            str(file),
            "--grpc",
            "127.0.0.1:0",
            "--out",
            f"{folder}/out",
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as broker:
            assert broker.stdout is not None
            said = [broker.stdout.readline().removeprefix("export ").strip().partition("=") for _ in range(2)]
            addresses = {name: address for name, _, address in said}
            found = {door: measure(turns_of(door, addresses), args.turns) for door in DOORS}
            broker.terminate()
    told = {
        door: {
            "p50_ms": round(1000 * statistics.median(seconds), 2),
            "p95_ms": round(1000 * statistics.quantiles(seconds, n=20)[-1], 2),
        }
        for door, seconds in found.items()
    }
    if args.json:
        print(json.dumps(told))
    else:
        for door, numbers in told.items():
            print(f"{door:12} {numbers['p50_ms']:6.2f} ms (p95 {numbers['p95_ms']:.2f} ms)")


if __name__ == "__main__":
    main()
