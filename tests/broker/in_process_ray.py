"""What programs with real trainers share: Ray's calls in this process, fake packages, a record of the device."""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.machinery
import json
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

SIZE = 1000


class Handle:
    """As a Ray actor's: `handle.method.remote(...)` calls the worker's method here, at once."""

    def __init__(self, worker: object) -> None:
        self._worker = worker

    def __getattr__(self, name: str) -> SimpleNamespace:
        if name == "__ray_call__":
            return SimpleNamespace(remote=lambda function, *args: function(self._worker, *args))
        return SimpleNamespace(remote=getattr(self._worker, name))


def use_ray_in_process() -> None:
    """References are the values themselves."""
    import ray

    ray.get = ray.put = lambda value, **_: value
    ray.wait = lambda refs, **_: (refs[:1], refs[1:])


class FakePackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of packages that need a GPU to install; any name in them is an empty class."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self._names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = ModuleType(spec.name)
        module.__version__ = "0.99.0"
        module.__getattr__ = lambda name: self._new_class(module, name)
        return module

    def exec_module(self, module) -> None: ...

    @staticmethod
    def _new_class(module: ModuleType, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__init__": lambda self, *_, **given: self.__dict__.update(given)})
        setattr(module, name, made)
        return made


def fake_packages(*names: str) -> None:
    sys.meta_path.insert(0, FakePackages(*names))


class Device:
    """Writes down what lies on each pool, and who computes there; stalls for good, or raises, where it is told to."""

    def __init__(self, name: str, record: Path, stall: str) -> None:
        self.name, self._record, self._stall = name, record, stall
        self._go = record.parent / "go"
        """Computing begins when it is there."""
        self._sizes: dict[str, dict[str, int]] = {}

    def write(self, pool: str, what: str) -> None:
        size = sum(self._sizes.get(pool, {}).values())
        with self._record.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps([time.monotonic(), f"{self.name}@{pool}", what, size]) + "\n")

    def put(self, pool: str, thing: str, size: int) -> None:
        """That many bytes of the thing are on the pool from now on."""
        if self._sizes.setdefault(pool, {}).get(thing, 0) != size:
            self._sizes[pool][thing] = size
            self.write(pool, f"{thing} {'comes' if size else 'leaves'}")

    def lies(self, pool: str, thing: str) -> bool:
        return bool(self._sizes.get(pool, {}).get(thing))

    def compute(self, pool: str, thing: str, what: str) -> None:
        while not self._go.exists():
            time.sleep(0.01)
        assert self._sizes[pool][thing], f"{what} by {thing}, which is not on {pool}"
        self.write(pool, "begins")
        self.write(pool, what)
        if what == self._stall:
            time.sleep(1e6)
        self.write(pool, "ends")
        if f"break {what}" == self._stall:
            raise KeyError("of the framework's own")


def write_phases(share: ModuleType, device: Device) -> None:
    """Write down each phase that the adapter asks for, which no log of the broker has with its step."""
    phase = share.Job.phase

    def writing(job, role, *, step=None, also=(), **given):
        device.write("phases", " ".join(map(str, (step, role, *also))))
        return phase(job, role, step=step, also=also, **given)

    share.Job.phase = writing


def chain(before: str, *things: object) -> str:
    """A state that depends on all before: a lost, doubled or reordered step ends with another."""
    return hashlib.sha256(repr((before, things)).encode()).hexdigest()
