"""A rollout device in virtual time: slots, contexts, interrupts.

    submit ──▶ waiting ──slot free──▶ seated ──last token──▶ ended      seconds of each decode step: sim/models/costs.py

The seconds to the next ending follow from the seated answers. Any change before it (new answers, weights, cuts) keeps
the whole tokens made so far. Devices with one queue between them take the next answer as a slot becomes free; devices
with a queue each keep what they were dealt.

`sim/models/decoder.py` plays the same device without interrupts; both give the same seconds.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from rlmux.sim.models.costs import rollout_costs
from rlmux.sim.models.decoder import DecodeSeconds
from rlmux.sim.models.lengths import length_distribution
from rlmux.sim.models.substages import SubStageWorld


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One trajectory of one turn."""

    number: int
    """Place in the order of submission, unique in a run."""
    group: int
    """Prompt group, unique in a run."""
    length: int
    """Tokens that the model makes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A complete answer."""

    answer: Answer
    end_s: float
    """Seconds since the start of the run."""
    first_version: int
    """Weight version of its first token."""
    last_version: int
    """Weight version of its last token."""


class VirtualDevice:
    """One rollout device."""

    def __init__(
        self,
        costs: DecodeSeconds,
        *,
        slots: int,
        group_size: int,
        prompt_tokens: float,
        waiting: deque[Answer] | None = None,
        start_s: float = 0.0,
    ) -> None:
        """`waiting`: a queue shared with other devices."""
        self._costs = costs
        self._slots = slots
        self._group_size = group_size
        self._prompt_tokens = prompt_tokens
        self.now_s = start_s
        """Start of the decode span; later than the clock while a prefill runs."""
        self._iteration = 0
        self._seated: list[tuple[int, int, int, int, Answer]] = []
        """Heap of (last iteration, number, first iteration, version of the first token, answer)."""
        self._first_sum = 0
        """Sum of the seated answers' first iterations."""
        self._span_s = 0.0
        """Seconds from `now_s` to the next ending."""
        self.waiting: deque[Answer] = deque() if waiting is None else waiting
        self.version = 0
        self._next_version: int | None = None
        """Version that is loaded when the last seated answer ends."""
        self.busy_s = 0.0
        self.decoded_tokens = 0

    @property
    def num_seated(self) -> int:
        return len(self._seated)

    @property
    def num_free(self) -> int:
        """Slots that may be taken now."""
        return 0 if self._next_version is not None else self._slots - len(self._seated)

    @property
    def next_end_s(self) -> float:
        return self.now_s + self._span_s if self._seated else math.inf

    def finish(self) -> list[Ended]:
        """Advance to the next ending: the answers that end there. Free slots are taken from the queue."""
        end_s = self.next_end_s
        self._move(end_s, self._seated[0][0])
        ended = []
        while self._seated and self._seated[0][0] <= self._iteration:
            _, _, first, version, answer = heapq.heappop(self._seated)
            self._first_sum -= first
            ended.append(Ended(answer=answer, end_s=end_s, first_version=version, last_version=self.version))
        if self._next_version is not None and not self._seated:
            self.version, self._next_version = self._next_version, None
        self._seat_waiting()
        return ended

    def seat(self, answers: Sequence[Answer], now_s: float) -> None:
        """Start answers in free slots, behind one prefill."""
        self._advance(now_s)
        self._spend(self._prefill_s(answers))
        self._begin_span()

    def take_from_queue(self, now_s: float) -> None:
        """Fill free slots from the queue."""
        self._advance(now_s)
        self._seat_waiting()

    def load(self, version: int, now_s: float, *, drains: bool = False) -> None:
        """New weights: seated answers are computed again under them, or, with `drains`, end under the old ones while
        no slot is taken."""
        if drains and self._seated:
            self._next_version = version
            return
        self._advance(now_s)
        self.version = version
        # Heap order stays: the version is compared after the number.
        self._seated = [
            (end, number, first, version if first == self._iteration else was, answer)
            for end, number, first, was, answer in self._seated
        ]
        if self._seated:
            tokens = len(self._seated) * (self._prompt_tokens + self._iteration) - self._first_sum
            self._spend(self._costs.prefill_s(tokens))
        self._begin_span()

    def cut(self, groups: Collection[int] | None, now_s: float) -> None:
        """Drop the answers of these groups, or all, seated or waiting in this device's queue, and fill their slots."""
        self._advance(now_s)
        self._seated = [seated for seated in self._seated if groups is not None and seated[-1].group not in groups]
        heapq.heapify(self._seated)
        self._first_sum = sum(first for _, _, first, _, _ in self._seated)
        kept = [answer for answer in self.waiting if groups is not None and answer.group not in groups]
        self.waiting.clear()
        self.waiting.extend(kept)
        self._seat_waiting()

    # ------------------------------------------------------------------ inside

    def _advance(self, now_s: float) -> None:
        """Decode until `now_s`, before the next ending: whole tokens, and not while a prefill runs."""
        if not self._seated:
            self.now_s = max(self.now_s, now_s)
        elif now_s > self.now_s:
            num_left = self._seated[0][0] - self._iteration
            made = min(int((now_s - self.now_s) / self._span_s * num_left), num_left - 1)
            self._move(now_s, self._iteration + made)

    def _move(self, to_s: float, iteration: int) -> None:
        self.busy_s += to_s - self.now_s
        self.decoded_tokens += len(self._seated) * (iteration - self._iteration)
        self.now_s, self._iteration = to_s, iteration

    def _spend(self, seconds: float) -> None:
        self.busy_s += seconds
        self.now_s += seconds

    def _seat_waiting(self) -> None:
        answers = [self.waiting.popleft() for _ in range(min(self.num_free, len(self.waiting)))]
        self._spend(self._prefill_s(answers))
        self._begin_span()

    def _prefill_s(self, answers: Sequence[Answer]) -> float:
        """Seat the answers. Returns the seconds of their prefill; a group's answers share its prompt."""
        for answer in answers:
            end = self._iteration + answer.length
            heapq.heappush(self._seated, (end, answer.number, self._iteration, self.version, answer))
        self._first_sum += self._iteration * len(answers)
        return self._costs.prefill_s(len(answers) * self._prompt_tokens / self._group_size) if answers else 0.0

    def _begin_span(self) -> None:
        if self._seated:
            made = self._iteration - self._first_sum / len(self._seated)
            num_iterations = self._seated[0][0] - self._iteration
            self._span_s = self._costs.decode_span_s(len(self._seated), self._prompt_tokens + made, num_iterations)


class VirtualEngine:
    """All rollout devices of one pipeline, which end their answers in one order."""

    def __init__(self, world: SubStageWorld, num_devices: int, *, has_one_queue: bool) -> None:
        self.slots = world.slots
        distribution = length_distribution(world.lengths_of)
        queue: deque[Answer] | None = deque() if has_one_queue else None
        self.devices = [
            VirtualDevice(
                rollout_costs(world.model, world.gpu, world.tp), slots=world.slots,
                group_size=distribution.group_size, prompt_tokens=distribution.prompt_tokens, waiting=queue,
            )
            for _ in range(num_devices)
        ]  # fmt: skip
        self._queue = queue

    @property
    def next_end_s(self) -> float:
        """Seconds at which the next answer ends; infinite for an idle engine."""
        return min(device.next_end_s for device in self.devices)

    @property
    def busy_s(self) -> float:
        """Device-seconds of prefill and decoding."""
        return sum(device.busy_s for device in self.devices)

    @property
    def decoded_tokens(self) -> int:
        """Tokens produced, cut answers included."""
        return sum(device.decoded_tokens for device in self.devices)

    def finish(self) -> list[Ended]:
        """The answers that end next, on the first device where one does."""
        return min(self.devices, key=lambda device: device.next_end_s).finish()

    def deal(self, by_device: Sequence[Sequence[Answer]], now_s: float) -> None:
        """Give each device answers of its own."""
        for device, answers in zip(self.devices, by_device, strict=True):
            device.waiting.extend(answers)
            device.take_from_queue(now_s)

    def submit(self, answers: Iterable[Answer], now_s: float) -> None:
        """Queue answers for all devices; each goes to the device with the most free slots, or waits for one."""
        assert self._queue is not None, "devices with a queue each are dealt to"
        self._queue.extend(answers)
        free = {index: device.num_free for index, device in enumerate(self.devices)}
        taken: dict[int, list[Answer]] = {index: [] for index in free}
        while self._queue and any(free.values()):
            index = max(free, key=lambda index: (free[index], -index))
            taken[index].append(self._queue.popleft())
            free[index] -= 1
        for index, dealt in taken.items():
            if dealt:
                self.devices[index].seat(dealt, now_s)

    def run(self) -> list[Ended]:
        """All answers to their end, in the order of their endings."""
        ended: list[Ended] = []
        while self.next_end_s < math.inf:
            ended += self.finish()
        return ended


def by_index(answers: Sequence[Answer], num_devices: int) -> list[list[Answer]]:
    """Whole prompt groups, dealt to the devices in turn."""
    first = answers[0].group if answers else 0
    return [
        [answer for answer in answers if (answer.group - first) % num_devices == index] for index in range(num_devices)
    ]


def answers_of(world: SubStageWorld, step: int) -> list[Answer]:
    """The answers of a step, in prompt order."""
    size, num = length_distribution(world.lengths_of).group_size, world.num_sequences
    first, first_group = (step - 1) * num, (step - 1) * num_groups_of(world)
    return [
        Answer(number=first + place, group=first_group + place // size, length=length)
        for place, length in enumerate(world.lengths(step))
    ]


def num_groups_of(world: SubStageWorld) -> int:
    """Prompt groups of a step."""
    return math.ceil(world.num_sequences / length_distribution(world.lengths_of).group_size)
