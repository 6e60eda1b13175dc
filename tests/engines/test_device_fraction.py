"""Device fractions: which are prepared, and that a process set to one is held back to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from rlmux.engines import device_fraction as fractions


def test_the_larger_fraction_is_never_held_back():
    assert [fractions.nice_of(device_fraction) for device_fraction in (0.5, 0.75, 1.0)] == [0, 0, 0]


@pytest.mark.parametrize(("device_fraction", "nice"), [(0.1, 10), (0.25, 5), (0.014, 19), (0.0001, 19)])
def test_the_smaller_fraction_has_the_niceness_whose_weight_it_is(device_fraction, nice):
    assert fractions.nice_of(device_fraction) == nice


def test_a_fraction_holds_until_the_next_one_is_set():
    """In a process of its own, as a worker is."""
    probe = fractions.probe("cpu")
    if not probe.prepared:
        pytest.skip(f"no fractions here: {probe.missing}")
    code = (
        "import json, os, time; from rlmux.engines.device_fraction import fraction_setter\n"
        "os.setsid() if os.getsid(0) != os.getpid() else None\n"
        "group = '/proc/self/autogroup'\n"
        "def of_group(): return int(open(group).read().split()[-1]) if os.path.exists(group) else None\n"
        "setter = fraction_setter('cpu'); seen, before = [], of_group()\n"
        "for device_fraction in (1.0, 0.25, 0.25, 0.75, 1.0):\n"
        "    setter.set(device_fraction); seen.append(os.getpriority(0, 0))\n"
        # Linux allows ten changes a second, of all sessions together.
        "    while setter.device_fraction != device_fraction:\n"
        "        time.sleep(0.1); setter.set(device_fraction)\n"
        "print(json.dumps([seen, before, of_group()]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    base = os.getpriority(os.PRIO_PROCESS, 0)
    changes = [base, min(19, base + 5), min(19, base + 5), base, base]
    seen, group_before, group_after = json.loads(done.stdout)
    assert seen in (changes, [base] * 5)
    assert group_after == group_before


def test_a_probe_leaves_this_process_as_it_was():
    before = os.getpriority(os.PRIO_PROCESS, 0)
    found = fractions.probe("cpu")
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
    assert found.device.startswith("cpu: ")
    assert bool(found.prepared) != bool(found.missing)


def test_without_a_gpu_the_probe_says_so():
    found = fractions.probe("cuda")
    if not found.device.startswith("cuda"):
        pytest.skip("there is a GPU")
    assert (found.prepared, found.how, found.missing) == ((), "", "torch sees no CUDA device")
    fractions.fraction_setter("cuda").set(0.5)  # nothing to set, nothing raised


@pytest.mark.parametrize(
    ("num_sms", "major", "sizes"), [(132, 9, [24, 48, 72, 104]), (108, 8, [20, 42, 64, 86]), (8, 8, [4])]
)
def test_green_contexts_leave_room_for_the_other_side(num_sms, major, sizes):
    made = fractions.green_sizes(num_sms, major)
    assert list(made.values()) == sizes
    assert all(fraction == size / num_sms for fraction, size in made.items())


def test_a_change_that_the_system_refuses_is_tried_again(monkeypatch, tmp_path):
    """Linux allows ten changes of a session's niceness a second."""
    group = tmp_path / "missing" / "autogroup"
    monkeypatch.setattr(fractions, "_AUTOGROUP", group)
    setter = fractions.NiceFraction()
    monkeypatch.setattr(fractions.NiceFraction, "_can_raise", False)
    monkeypatch.setattr(fractions.NiceFraction, "_has_group", True)
    setter.set(0.25)
    group.parent.mkdir()
    group.write_text("/autogroup-7 nice 0\n")
    setter.set(0.25)
    assert int(group.read_text()) == fractions.nice_of(0.25)


def test_each_fraction_of_a_gpu_has_a_stream_of_its_own_context_the_whole_ones_first(monkeypatch):
    """With contexts of ours: torch's need a GPU."""
    made = []

    def whole_stream():
        made.append("whole")
        return "whole"

    def context(num_sms):
        def stream():
            made.append(num_sms)
            return num_sms

        return SimpleNamespace(
            Stream=stream, set_context=lambda: made.append("set"), pop_context=lambda: made.append("pop")
        )

    monkeypatch.setattr(fractions, "_SIDE_STREAMS", fractions._SideStreams())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", whole_stream)
    setter = fractions.GreenContextFraction()
    monkeypatch.setattr(setter, "_sizes", {0.4: 52, 0.6: 80})
    monkeypatch.setattr(setter, "_context", context)
    setter.set(0.4)
    assert made == ["whole", "set"]
    assert [fractions.side_stream() for _ in range(2)] == [(0.4, 52)] * 2
    setter.set(0.6)
    assert fractions.side_stream() == (0.6, 80)
    setter.set(1.0)
    assert fractions.side_stream() == (1.0, "whole")
    assert made == ["whole", "set", 52, "pop", "set", 80, "pop"]
