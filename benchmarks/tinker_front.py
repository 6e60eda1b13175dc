"""The Tinker front of `rlmux serve`: what it adds to a step, what two clients gain by sharing, and a crowd of clients.

    python benchmarks/tinker_front.py --sdk .venv-tinker/bin/python        `make test-tinker` makes that Python
    python benchmarks/tinker_front.py --sdk PYTHON --parts step --steps 12 --json

step    The same GRPO step (model, prompts, lengths) by a loop on the SDK alone on a server, and by `rlmux run`. What is
        outside the engines is what a step takes less the seconds that its orders computed; the client's own seconds
        (datums, rewards) are told apart. Also a request for one token, from the SDK and back, and the CPU seconds of a
        step by part, which other programs on the machine change little: the client while it waits for results, the
        server's first thread (the controller) and its others (HTTP, models).
share   Two such loops that think as long as their work takes alone: one after the other, and together. Their weights
        are compared.
crowd   50 clients that only show life and 8 that train, on one server: requests answered, seconds of a heartbeat. The
        former are a process of their own that does nothing else: in one event loop with the latter, they would wait for
        their own process. `resent`: requests that were sent again, as SDKs do, because their connection broke.

tenants Two clients that train adapters of one model, with 72 samples of 60 tokens each, `--steps` times: one after the
        other, and at once, when they are sampled in one batch. What each got is compared.

A client or server that ends before its time is told with its exit code and what it wrote last; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
MODEL = {"hidden_size": 64, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate_size": 128}
MAX_PROMPT, GROUP_SIZE, SLOTS = 32, 8, 256
SKIPPED_STEPS = 2
PARTS = ("step", "share", "crowd", "tenants")
POOLS = {"rollout": {"devices": 1}, "train": {"devices": 1}}
LIMIT_S = 600.0
NUM_TOLD_LINES = 40
TENANTS, TENANTS_TOKENS = ROOT / "tests" / "tinker" / "tenants.py", 60


# ------------------------------------------------------------------ a client, in the SDK's Python


def loop(seed: int, steps: int, prompts: int, tokens: int, think_s: float) -> None:
    """A GRPO loop of the SDK's user; prints a line for each step and the path of its last weights."""
    import tinker
    from tinker import types

    training = tinker.ServiceClient().create_lora_training_client(base_model="rlmux/tiny", rank=8, seed=seed)
    params, encode = types.SamplingParams(max_tokens=tokens, temperature=1.0, stop=[]), training.get_tokenizer().encode
    print(json.dumps({"is_ready": True}), flush=True)
    sys.stdin.readline()
    sampler = training.save_weights_and_get_sampling_client()
    for step in range(steps):
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        words = [encode(f"Sort {100_000 * seed + prompts * step + one}.") for one in range(prompts)]
        asked = [
            sampler.sample(prompt=types.ModelInput.from_ints(each), num_samples=GROUP_SIZE, sampling_params=params)
            for each in words
        ]
        answers = [one.result().sequences for one in asked]
        sampled_s, sampled_cpu_s = time.perf_counter(), time.process_time()
        data = [one for each, group in zip(words, answers, strict=True) for one in datums(each, group)]
        time.sleep(think_s)
        thought_s, thought_cpu_s = time.perf_counter(), time.process_time()
        done: list[Any] = [
            training.forward_backward(data, "importance_sampling"),
            training.optim_step(types.AdamParams(learning_rate=1e-3)),
        ]
        sampler = training.save_weights_and_get_sampling_client()
        for one in done:
            one.result()
        end_s, cpu_s = time.perf_counter(), time.process_time() - thought_cpu_s + sampled_cpu_s - begin_cpu_s
        told = {"step_s": end_s - begin_s, "client_s": thought_s - sampled_s, "cpu_s": cpu_s}
        print(json.dumps(told), flush=True)
    single = types.SamplingParams(max_tokens=1, stop=[])
    for _ in range(steps):
        begin_s = time.perf_counter()
        sampler.sample(prompt=types.ModelInput.from_ints(words[0]), num_samples=1, sampling_params=single).result()
        print(json.dumps({"request_s": time.perf_counter() - begin_s}), flush=True)
        time.sleep(0.1)
    print(json.dumps({"path": training.save_state("end").result().path}), flush=True)


def datums(prompt: Sequence[int], group: Sequence[Any]) -> list[Any]:
    """A group's answers as the loss takes them; the reward is a sum of characters."""
    import numpy as np

    from tinker import types

    rewards = [sum(one.tokens) % 7 for one in group]
    found = []
    for one, reward in zip(group, rewards, strict=True):
        words, before = [*prompt, *one.tokens], [0.0] * (len(prompt) - 1)
        inputs: dict[str, Any] = {
            "target_tokens": np.array(words[1:], np.int64),
            "logprobs": np.array([*before, *one.logprobs], np.float32),
            "advantages": np.array(before + [reward - sum(rewards) / len(group)] * len(one.tokens), np.float32),
        }
        tensors = {name: types.TensorData.from_numpy(array) for name, array in inputs.items()}
        found.append(types.Datum(model_input=types.ModelInput.from_ints(words[:-1]), loss_fn_inputs=tensors))
    return found


class Loop:
    """A client process; `begin` once it is ready."""

    def __init__(self, args: argparse.Namespace, url: str, folder: Path, seed: int, think_s: float) -> None:
        words = [args.sdk, "-W", "ignore", __file__, "--loop", str(seed), str(think_s)]
        words += [f"--steps={args.steps}", f"--prompts={args.prompts}", f"--tokens={args.tokens}"]
        self._seed = seed
        self._log = folder / f"client-{seed}.log"
        with self._log.open("w") as errors:
            self._process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                cwd=folder / "tokenizers", env=of_client(url),
            )  # fmt: skip
        self.told: list[dict[str, Any]] = []
        self.read()

    def begin(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def end(self) -> None:
        """Wait for its end; what it told is in `told`."""
        while "path" not in self.told[-1]:
            self.read()
        self._process.communicate()

    def all_of(self, key: str) -> list[float]:
        return [one[key] for one in self.told if key in one]

    def read(self) -> None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EndedError(
                f"client {self._seed}; --sdk: a Python with tinker 0.25 or newer", self._process, self._log
            )
        self.told.append(json.loads(line))


# ------------------------------------------------------------------ servers and runs


class EndedError(Exception):
    """A process that ended before its time, with what it wrote last."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: Path) -> None:
        super().__init__(f"{name} ended with exit code {process.wait()}\n{tail(log)}")


def tail(log: Path) -> str:
    """The last lines of a log, under its name."""
    lines = log.read_text(errors="replace").splitlines()[-NUM_TOLD_LINES:] if log.is_file() else []
    return "\n".join([f"--- {log.name}, {len(lines)} last lines", *lines])


class Server(NamedTuple):
    """A server process."""

    url: str
    pid: int

    def cpu_s(self) -> tuple[float, float]:
        """(CPU seconds of its first thread, of all others) so far; its workers are other processes."""
        seconds = {}
        for thread in Path(f"/proc/{self.pid}/task").iterdir():
            with contextlib.suppress(OSError):  # one that ended meanwhile
                seconds[int(thread.name)] = int((thread / "schedstat").read_text().split()[0]) / 1e9
        first = seconds.pop(self.pid)
        return first, sum(seconds.values())


@contextlib.contextmanager
def server(tokens: int, folder: Path, parameters: str = "full") -> Iterator[Server]:
    """A server of one tiny model in a folder to make, which samples so many tokens at most."""
    served = {"model": MODEL, "max_prompt_tokens": MAX_PROMPT + tokens, "max_new_tokens": tokens, "slots": SLOTS}
    serve = {"parameters": parameters, "models": {"rlmux/tiny": served}}
    file = folder.with_suffix(".json")
    file.write_text(json.dumps({"cluster": {"pools": POOLS}, "serve": serve}))
    words = [sys.executable, "-m", "rlmux", "serve", str(file), "--out", str(folder), "--listen", "127.0.0.1:0"]
    log = folder.with_suffix(".log")
    with log.open("w") as errors:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, text=True, env=environ())
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise EndedError("the server", process, log)
        yield Server(line.strip().partition("=")[2].removesuffix("/tinker"), process.pid)
    except Exception as error:
        code = process.poll()
        print(f"server: {'runs' if code is None else f'ended with exit code {code}'}\n{tail(log)}", file=sys.stderr)
        for workers in sorted(folder.glob("models/*/workers.log")):
            print(f"{workers.parent.name}: {tail(workers)}", file=sys.stderr)
        raise SystemExit(f"{type(error).__name__}: {error}") from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()  # a job in the background ignores SIGINT
        process.communicate()


def of_client(url: str) -> dict[str, str]:
    """The environment of a program with the SDK."""
    own = {"TINKER_BASE_URL": f"{url}/tinker", "TINKER_API_KEY": "tml-x", "TINKER_TELEMETRY": "0"}
    return {**os.environ, **own, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def environ() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


def run_alone(args: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """The same step by `rlmux run`."""
    from rlmux.report.api import read_timeline

    pipeline = {
        "name": "alone", "steps": args.steps, "model": MODEL, "task": {"name": "sort", "digits": 5},
        "algorithm": {"prompts_per_step": args.prompts, "group_size": GROUP_SIZE, "learning_rate": 1e-3},
        "rollout": {"slots": SLOTS, "max_new_tokens": args.tokens, "max_prompt_tokens": MAX_PROMPT},
    }  # fmt: skip
    file = folder.with_suffix(".json")
    file.write_text(json.dumps({"cluster": {"pools": POOLS}, "pipelines": [pipeline]}))
    words = [sys.executable, "-m", "rlmux", "run", str(file), "--out", str(folder), "--json"]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, env=environ())
    (record,) = read_timeline(folder).pipelines.values()
    ended_s = [at_s for step, at_s in sorted(record.published.items()) if step > 0]
    return {"step_s": [after - before for before, after in pairwise(ended_s)], "engine_s": engine_seconds(folder)}


def engine_seconds(folder: Path) -> list[float]:
    """Computed seconds of each step's orders; the last steps of a server's log may be of single requests."""
    from rlmux.core.actions import RunStage
    from rlmux.core.events import StageFinished
    from rlmux.report.log import LogReader

    seconds: dict[int, float] = {}
    step_by_order: dict[Any, int] = {}
    with LogReader(folder) as log:
        for entry in log.entries():
            match entry.value:
                case RunStage() as order:
                    step_by_order[order.order] = order.step
                case StageFinished() as ended:
                    step = step_by_order[ended.order]
                    seconds[step] = seconds.get(step, 0.0) + ended.seconds
    return [seconds[step] for step in sorted(seconds)]


# ------------------------------------------------------------------ the parts


def measure_step(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    by_run = run_alone(args, folder / "run")
    with server(args.tokens, folder / "served") as served:
        client = Loop(args, served.url, folder / "served", 1, 0.0)
        before = served.cpu_s()
        client.begin()
        while len(client.all_of("step_s")) < args.steps:
            client.read()
        first_s, others_s = ((now - then) / args.steps for now, then in zip(served.cpu_s(), before, strict=True))
        client.end()
    engines = engine_seconds(folder / "served")[: args.steps]
    waits = [step - own for step, own in zip(client.all_of("step_s"), client.all_of("client_s"), strict=True)]
    outside = statistics.median(waits[SKIPPED_STEPS:]) - statistics.median(engines[SKIPPED_STEPS:])
    run_s, run_engine_s = (statistics.median(by_run[key][SKIPPED_STEPS:]) for key in ("step_s", "engine_s"))
    return {
        "step_s": quantiles(waits[SKIPPED_STEPS:]),
        "client_s": quantiles(client.all_of("client_s")[SKIPPED_STEPS:]),
        "engine_s": quantiles(engines[SKIPPED_STEPS:]),
        "outside_s": outside,
        "run_step_s": quantiles(by_run["step_s"][SKIPPED_STEPS:]),
        "run_engine_s": quantiles(by_run["engine_s"][SKIPPED_STEPS:]),
        "run_outside_s": run_s - run_engine_s,
        "overhead_part": (outside - (run_s - run_engine_s)) / run_s,
        "request_s": quantiles(client.all_of("request_s")),
        "client_cpu_s": statistics.median(client.all_of("cpu_s")[SKIPPED_STEPS:]),
        "controller_cpu_s": first_s,
        "http_cpu_s": others_s,
    }


def measure_share(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """`think_s`: as long as the work of a step takes alone."""
    with server(args.tokens, folder / "served") as (url, _):
        first = Loop(args, url, folder / "served", 9, 0.0)
        first.begin()
        first.end()
        think_s = statistics.median(first.all_of("step_s")[SKIPPED_STEPS:])
        made = {}
        for name, groups in (("after", [[1], [2]]), ("together", [[1, 2]])):
            makespan_s, weights = 0.0, {}
            for seeds in groups:
                clients = {seed: Loop(args, url, folder / "served", seed, think_s) for seed in seeds}
                begin_s = time.monotonic()
                for client in clients.values():
                    client.begin()
                for seed, client in clients.items():
                    client.end()
                    weights[seed] = sha256_of(folder / "served", client.told[-1]["path"])
                makespan_s += time.monotonic() - begin_s
            made[name] = (makespan_s, weights)
    return {
        "think_s": think_s,
        "after_s": made["after"][0],
        "together_s": made["together"][0],
        "gain": made["after"][0] / made["together"][0],
        "same_weights": made["after"][1] == made["together"][1],
    }


def sha256_of(folder: Path, path: str) -> str:
    run, kind, name = path.removeprefix("tinker://").split("/")
    session, _, number = run.split(":")
    state = folder / "models" / f"{session.partition('-')[0]}-{number}" / f"{kind}-{name}" / "state.json"
    return str(json.loads(state.read_text())["weights_sha256"])


def measure_crowd(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    with server(args.tokens, folder / "served") as (url, _):
        words = [sys.executable, __file__, "--beats", url, "--idle", str(args.idle)]
        log = folder / "idle.log"
        with log.open("w") as errors:
            idle = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            seconds, answers, num_resent = asyncio.run(crowd(url, args.busy, args.steps))
            if idle.poll() is not None:
                raise EndedError("the idle clients", idle, log)
        finally:
            told = idle.communicate("\n")[0] if idle.poll() is None else ""
        if not told:
            raise EndedError("the idle clients", idle, log)
        beats = json.loads(told)
    return {
        "seconds": seconds,
        "requests": sum(sent for sent, _ in answers),
        "answered": sum(answered for _, answered in answers),
        "resent": num_resent + beats["num_resent"],
        "heartbeats": len(beats["seconds"]),
        "heartbeat_s": quantiles(beats["seconds"]),
    }


def measure_tenants(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    with server(TENANTS_TOKENS, folder / "served", "lora") as (url, _):
        words = [args.sdk, "-W", "ignore", str(TENANTS), "rlmux/tiny", str(args.steps)]
        place = folder / "served" / "tokenizers"
        told = subprocess.run(
            words, check=True, stdout=subprocess.PIPE, text=True, cwd=place, env=of_client(url)
        ).stdout
    rows = [json.loads(line) for line in told.splitlines()]
    return {
        "after_s": quantiles([row["alone_s"] for row in rows]),
        "together_s": quantiles([row["together_s"] for row in rows]),
        "gain": statistics.median(row["alone_s"] / row["together_s"] for row in rows),
        "same_results": all(row["alone"] == row["together"] == rows[0]["alone"] for row in rows),
    }


def show_life(url: str, num_clients: int) -> None:
    """Have clients show life once a second, ten times as often as the SDK does, until stdin has a line; prints the
    seconds of each time, and how many had to be sent again."""
    address = url.removeprefix("http://")
    clients = [
        (http.client.HTTPConnection(address, timeout=LIMIT_S), b"{}", "create_session") for _ in range(num_clients)
    ]
    seconds: list[float] = []
    num_resent, is_over = 0, False
    while not is_over:
        following = []
        for connection, body, route in clients:
            begin_s = time.perf_counter()
            headers = {"X-API-Key": "tml-x", "Content-Type": "application/json"}
            told = beat(connection, f"/tinker/api/v1/{route}", body, headers)
            if told is None:  # the server closes a connection that was idle, perhaps just now
                connection.close()
                num_resent += 1
                told = beat(connection, f"/tinker/api/v1/{route}", body, headers)
            if told is None:
                raise SystemExit(f"{route}: a new connection broke, too")
            if route == "session_heartbeat":
                seconds.append(time.perf_counter() - begin_s)
            else:
                body = json.dumps({"session_id": told["session_id"]}).encode()
            following.append((connection, body, "session_heartbeat"))
            is_over = bool(select.select([sys.stdin], [], [], 1.0 / num_clients)[0])
            if is_over:
                break
        clients = following
    print(json.dumps({"seconds": seconds, "num_resent": num_resent}))


def beat(
    connection: http.client.HTTPConnection, path: str, body: bytes, headers: Mapping[str, str]
) -> dict[str, Any] | None:
    """The answer; None where the connection broke."""
    try:
        connection.request("POST", path, body=body, headers=headers)
        return dict(json.loads(connection.getresponse().read()))
    except (http.client.RemoteDisconnected, ConnectionError):
        return None


async def crowd(url: str, num_busy: int, steps: int) -> tuple[float, list[tuple[int, int]], int]:
    """(seconds, requests that each client sent and results that it got, requests that were sent again)."""
    import httpx

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=f"{url}/tinker/api/v1/", timeout=LIMIT_S, limits=limits) as client:
        client.headers["X-API-Key"] = "tml-x"
        begin_s = time.monotonic()
        asked = Asked(client)
        answers = await asyncio.gather(*[train(asked, number, steps) for number in range(num_busy)])
        return time.monotonic() - begin_s, answers, asked.num_resent


class Asked:
    """Sends requests, and once more those whose connection broke."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.num_resent = 0

    async def post(self, route: str, **content: Any) -> Any:
        import httpx

        try:
            return await self._client.post(route, **content)
        except httpx.TransportError as error:
            self.num_resent += 1
            print(f"{route}: {type(error).__name__}: {error}; sent again", file=sys.stderr)
            return await self._client.post(route, **content)


async def ask(client: Asked, route: str, **body: Any) -> dict[str, Any]:
    answer = await client.post(route, json=body)
    if answer.status_code != 200:
        raise RuntimeError(f"{route} {body}: {answer.status_code} {answer.text}")
    return dict(answer.json())


async def train(client: Asked, seed: int, steps: int) -> tuple[int, int]:
    """Sample, train, save, again; (requests sent, results that were no error)."""
    session = (await ask(client, "create_session"))["session_id"]
    create = await ask(client, "create_model", session_id=session, model_seq_id=0, base_model="rlmux/tiny")
    model, results = create["model_id"], []
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
    for step in range(steps):
        save = await ask(
            client, "save_weights_for_sampler", model_id=model, seq_id=3 * step + 1, sampling_session_seq_id=step
        )
        results.append(await result(client, save["request_id"]))
        asked = {"sampling_session_id": f"{session}:sample:{step}", "prompt": prompt, "num_samples": 8}
        params = {"max_tokens": 16, "temperature": 1.0, "stop": []}
        sent = [await ask(client, "asample", seq_id=each, sampling_params=params, **asked) for each in range(4)]
        results += await asyncio.gather(*[result(client, each["request_id"]) for each in sent])
        body = training_body(model, 3 * step + 2, seed)
        loss = await client.post("forward_backward", content=body, headers={"Content-Type": "application/x-protobuf"})
        update = await ask(
            client, "optim_step", model_id=model, seq_id=3 * step + 3, adam_params={"learning_rate": 1e-3}
        )
        results += [await result(client, each) for each in (loss.json()["request_id"], update["request_id"])]
    return 7 * steps, sum(results)


async def result(client: Asked, request_id: str) -> bool:
    """Whether a request had a result that is no error, which is told."""
    while (answer := await client.post("retrieve_future", json={"request_id": request_id})).status_code == 408:
        pass
    is_json = answer.headers["content-type"].startswith("application/json")
    is_result = answer.status_code == 200 and not (is_json and "error" in answer.json())
    if not is_result:
        print(f"{request_id}: {answer.status_code} {answer.text}", file=sys.stderr)
    return is_result


def training_body(model: str, number: int, seed: int) -> bytes:
    import numpy as np

    from rlmux.service.tinker import wire_pb2 as wire

    generator = np.random.default_rng(seed)
    message = wire.ForwardBackwardRequest(model_id=model, seq_id=number, loss_fn="importance_sampling")
    for _ in range(32):
        tokens = generator.integers(0, 90, 20)
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = tokens[:-1].astype("<i4").tobytes()
        arrays = {
            "target_tokens": (tokens[1:].astype("<i8"), wire.DTYPE_INT64),
            "logprobs": (np.full(19, -4.0, "<f4"), wire.DTYPE_FLOAT32),
            "advantages": (generator.uniform(-1, 1, 19).astype("<f4"), wire.DTYPE_FLOAT32),
        }
        for name, (array, dtype) in arrays.items():
            datum.loss_fn_inputs[name].CopyFrom(wire.Tensor(dense=array.tobytes(), dtype=dtype, shape=[19]))
    return message.SerializeToString()


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(seconds, n=20, method="inclusive")
    return {"p50": statistics.median(seconds), "p95": cuts[18]}


# ------------------------------------------------------------------ the command


def show(name: str, found: Mapping[str, Any]) -> None:
    print(f"\n{name}")
    for key, value in found.items():
        if isinstance(value, Mapping):
            print(f"  {key:14} p50 {1e3 * value['p50']:8.1f} ms   p95 {1e3 * value['p95']:8.1f} ms")
        else:
            print(f"  {key:14} {value if isinstance(value, bool | int) else f'{value:.3f}'}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sdk", type=os.path.abspath, default=sys.executable, help="a Python with tinker")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=32, help="prompts of a step, 8 samples each")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of a sample")
    parser.add_argument("--idle", type=int, default=50)
    parser.add_argument("--busy", type=int, default=8)
    parser.add_argument("--loop", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--beats", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.beats:
        show_life(args.beats, args.idle)
        return
    if args.loop:
        loop(int(args.loop[0]), args.steps, args.prompts, args.tokens, float(args.loop[1]))
        return
    measures = {"step": measure_step, "share": measure_share, "crowd": measure_crowd, "tenants": measure_tenants}
    found = {}
    for name in args.parts.split(","):
        if name not in measures:
            raise SystemExit(f"--parts {name}: accepted: {', '.join(PARTS)}")
        with tempfile.TemporaryDirectory() as folder:
            found[name] = measures[name](args, Path(folder))
        if not args.json:
            show(name, found[name])
    if args.json:
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
