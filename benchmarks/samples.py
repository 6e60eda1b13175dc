"""How fast kept trajectories are found where a pipeline has a million of them.

    python benchmarks/samples.py [--samples 1000000] [--repeats 20] [--keep DIR] [--json]

The product's own writer makes the file: steps of 128 prompts with 8 answers of 30 words in the mean, whose frequencies
fall as words of a language do; one in twenty is cut at its length. Tokens are not kept. Each search opens the file
anew, as a request does, with parameters of its own; the page cache is as the searches before it left it.

    write_ms            CPU milliseconds to keep a trajectory
    mb                  of the file
    NAME  p50, p95      milliseconds of `--repeats` searches of a kind; goal: 200 for the p95 of all
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlmux.report.samples import SAMPLES_NAME, Sample, SampleReader, SampleWriter, page_of, whole_of

GOAL_MS = 200.0
PROMPTS, ANSWERS = 128, 8
NUM_WORDS = 20_000
"""Words that there are, the most frequent first: the word of rank r comes 1/r as often as the first."""
MOST_REWARD = 1.2


class Texts:
    """Words as a language has them, by chance."""

    def __init__(self) -> None:
        letters = random.Random(0)
        lengths = (letters.randint(3, 9) for _ in range(NUM_WORDS))
        made = ("".join(letters.choices("aeioulnrst", k=length)) for length in lengths)
        self.words = list(dict.fromkeys(made))
        self._weights = list(itertools.accumulate(1.0 / rank for rank in range(1, len(self.words) + 1)))

    def some(self, draw: random.Random, count: int) -> str:
        return " ".join(draw.choices(self.words, cum_weights=self._weights, k=count))


def step_of(texts: Texts, step: int) -> list[Sample]:
    """What a step leaves: rewards rise over the steps, as in a run that learns."""
    draw = random.Random(step)
    made = []
    for prompt in range(PROMPTS):
        prompt_text = texts.some(draw, 12)
        for place in range(ANSWERS):
            count = min(90, 5 + int(draw.expovariate(1 / 25)))
            made.append(
                Sample(
                    prompt=prompt,
                    sample=place,
                    prompt_text=prompt_text,
                    turns=((True, texts.some(draw, count)),),
                    reward=round(min(MOST_REWARD, max(0.0, draw.gauss(0.2 + step / 2500, 0.3))), 4),
                    advantage=round(draw.gauss(0.0, 1.0), 4),
                    stop="length" if draw.random() < 0.05 else "stop",
                    tokens=count * 2,
                    num_turns=1,
                    first_version=step - 1,
                    last_version=step - 1,
                )
            )
    return made


def write(path: Path, texts: Texts, num_samples: int) -> dict[str, float]:
    path.parent.mkdir(parents=True, exist_ok=True)
    writer, spent_s = SampleWriter(path, max_bytes=2**40), 0.0
    num_steps = -(-num_samples // (PROMPTS * ANSWERS))
    for step in range(1, num_steps + 1):
        samples = step_of(texts, step)
        begin_s = time.thread_time()
        writer.add(step, samples)
        spent_s += time.thread_time() - begin_s
    writer.close()
    return {"write_ms": 1000 * spent_s / (num_steps * PROMPTS * ANSWERS)}


Search = Callable[[SampleReader, random.Random], object]


def searches(texts: Texts, last_step: int) -> dict[str, Search]:
    """Kinds of searches, each with parameters that are drawn."""

    def rows(sort: str = "-step", at: int = 0, limit: int = 50, **asked: Callable[[random.Random], Any]) -> Search:
        def search(reader: SampleReader, draw: random.Random) -> object:
            drawn = {name: value(draw) for name, value in asked.items()}
            return page_of(reader, drawn, sort=sort, at=at, limit=limit)

        return search

    def one(reader: SampleReader, draw: random.Random) -> object:
        return whole_of(reader, step(draw), draw.randrange(PROMPTS), draw.randrange(ANSWERS))

    def export(reader: SampleReader, draw: random.Random) -> object:
        return [
            json.dumps(row) for row in page_of(reader, {"stop": "length"}, sort="step", at=2000, limit=200)["items"]
        ]

    def step(draw: random.Random) -> int:
        return draw.randint(1, last_step)

    def word(first: int, last: int) -> Callable[[random.Random], str]:
        return lambda draw: texts.words[draw.randrange(first, min(last, len(texts.words)))]

    def two(draw: random.Random) -> str:
        return f"{word(0, 30)(draw)} {word(0, 30)(draw)}"

    def just(value: Any) -> Callable[[random.Random], Any]:
        return lambda draw: value

    common, rare = word(0, 5), word(5000, 20000)
    return {
        "newest": rows(),
        "thousandth": rows(at=1000),
        "best of all": rows(sort="-reward"),
        "longest of a step": rows(sort="-tokens", step=step),
        "reward above": rows(least=lambda draw: draw.uniform(0.0, 1.0)),
        "reward below, oldest first": rows(sort="step", most=lambda draw: draw.uniform(0.0, 0.5)),
        "reward that none has": rows(least=just(MOST_REWARD + 1)),
        "cut at the length": rows(stop=just("length")),
        "cut at the length, best": rows(stop=just("length"), sort="-reward"),
        "stop that none has": rows(stop=just("other")),
        "a prompt over the steps": rows(prompt=lambda draw: draw.randrange(PROMPTS)),
        "prompt that none has": rows(prompt=just(PROMPTS + 1)),
        "frequent word": rows(text=common),
        "frequent word, worst": rows(text=common, sort="reward"),
        "frequent word, a reward that none has": rows(text=common, least=just(MOST_REWARD + 1)),
        "frequent word of a step": rows(text=common, step=step),
        "rare word": rows(text=rare),
        "rare word, best": rows(text=rare, sort="-reward"),
        "word cut short": rows(text=lambda draw: rare(draw)[:3]),
        "two words in a row": rows(text=two),
        "word that none has": rows(text=just("qqqq")),
        "open": one,
        "export 200 rows": export,
    }


def measure(path: Path, texts: Texts, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each search, by its kind."""
    with SampleReader(path) as reader:
        steps = reader.steps()
    assert steps is not None
    draw = random.Random(1)
    taken: dict[str, list[float]] = {}
    kinds = searches(texts, steps[1])
    for _ in range(repeats):
        for name, search in kinds.items():
            begin_s = time.perf_counter()
            with SampleReader(path) as reader:
                search(reader, draw)
            taken.setdefault(name, []).append(1000 * (time.perf_counter() - begin_s))
    return taken


def p95(taken: list[float]) -> float:
    return sorted(taken)[int(0.95 * (len(taken) - 1))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--keep", type=Path, help="folder that the file is left in; one that is there is read")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    texts = Texts()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        path = (arguments.keep or Path(scratch)) / SAMPLES_NAME
        if not path.exists():
            figures |= write(path, texts, arguments.samples)
        taken = measure(path, texts, arguments.repeats)
        figures["mb"] = path.stat().st_size / 1e6
    figures |= {name: [statistics.median(each), p95(each)] for name, each in taken.items()}
    figures["all"] = [statistics.median(every := [one for each in taken.values() for one in each]), p95(every)]
    if arguments.json:
        sys.exit(print(json.dumps(figures)))
    for name, value in figures.items():
        if isinstance(value, float):
            print(f"{name:40} {value:10.3g}")
        else:
            print(f"{name:40} p50 {value[0]:8.1f}  p95 {value[1]:8.1f}" + (f"  goal: {GOAL_MS:g}" * (name == "all")))


if __name__ == "__main__":
    main()
