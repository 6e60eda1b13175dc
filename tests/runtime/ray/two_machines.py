"""Two machines of a Ray cluster, as namespaces of this one: own network, processes, host name, /tmp and /dev/shm.

    machine a, 10.77.0.1  ◀── eth0 ── a veth pair ── eth0 ──▶  machine b, 10.77.0.2
         │                                                         │
         └───────────────── /mnt: one folder of both ──────────────┘

The first process of a machine does nothing but live: all others end with it, and it ends with the test's process. No
name or address of it is seen outside, so that machines of parallel tests do not meet.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.waiting import until

import rlmux

SHARED = Path("/mnt")
"""The path of the shared folder on both machines."""
ADDRESS = "10.77.0.1:6379"
_LIVE = """\
mount --bind "$1" /mnt && mount -t tmpfs tmp /tmp && mount -t tmpfs shm /dev/shm && hostname "$2" \\
    && ip link set lo up && touch "/mnt/.up-$2"
exec 2> /dev/null
while :; do sleep infinity & wait $!; done
"""
"""The first process of a machine: it also waits for processes whose parents have ended."""
_KILL = """\
for exe in /proc/[0-9]*/exe; do
    case "$(readlink "$exe")" in */"$1") pid=${exe%/exe}; kill -9 "${pid#/proc/}";; esac
done
"""
_KILL_ALL = '[ "$(hostname)" = "$1" ] && kill -9 -1 && rm -rf /tmp/* /dev/shm/*'
"""All processes of a namespace but its first; the host's name shows that it is the machine's namespace."""


def missing() -> str:
    """What this machine lacks for two machines; empty if nothing."""
    lacking = [program for program in ("unshare", "nsenter", "ip", "bash") if shutil.which(program) is None]
    if lacking:
        return f"needs {', '.join(lacking)}"
    if any(Path(each).is_relative_to("/tmp") for each in (rlmux.__file__, sys.prefix)):
        return "needs a source and an environment outside /tmp, of which each machine has its own"
    words = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "ip", "link", "add", "type", "veth"]
    made = subprocess.run(words, capture_output=True, text=True, check=False)
    return f"needs root and namespaces: {made.stderr.strip()}" if made.returncode else ""


class Machine:
    """Namespaces that are one machine, until `end`."""

    def __init__(self, name: str, address: str, shared: Path) -> None:
        self.name = name
        self.address = address
        words = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._holder = subprocess.Popen([*words, "bash", "-c", _LIVE, "live", str(shared), name], env=_environment())
        mark = shared / f".up-{name}"
        until(mark.exists, f"machine {name}", process=self._holder)
        mark.unlink()
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children")
        self.first_pid = int(children.read_text())

    def words(self, *command: str) -> list[str]:
        """The words that start a command on the machine."""
        return ["nsenter", "-t", str(self.first_pid), "-m", "-n", "-u", "-p", f"--wd={SHARED}", *command]

    def run(self, *command: str) -> None:
        """Run a command on the machine to its end. Fails with its output."""
        done = subprocess.run(self.words(*command), env=_environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"

    def start(self, *command: str, output: Path) -> subprocess.Popen[bytes]:
        """Start a command on the machine; what it prints goes to the file."""
        with output.open("wb") as file:
            return subprocess.Popen(self.words(*command), env=_environment(), stdout=file, stderr=subprocess.STDOUT)

    def start_ray(self, *, is_head: bool = False, **num_devices: int) -> None:
        """Make the machine a Ray node with so many devices of each pool."""
        resources = json.dumps({f"rlmux_{pool}": num for pool, num in num_devices.items()})
        role = ("--head", "--port=6379", "--include-dashboard=false") if is_head else (f"--address={ADDRESS}",)
        sizes = ("--num-cpus=1", "--num-gpus=0", "--object-store-memory=80000000", f"--resources={resources}")
        where = f"--node-ip-address={self.address}"
        self.run(sys.executable, "-m", "ray.scripts.scripts", "start", *role, where, *sizes, "--disable-usage-stats")

    def set_link(self, *, is_up: bool) -> None:
        """Raise or cut the machine's only link."""
        self.run("ip", "link", "set", "eth0", "up" if is_up else "down")

    def kill(self, program: str) -> None:
        """Send SIGKILL to the machine's processes of a program."""
        self.run("bash", "-c", _KILL, "kill", program)

    def kill_all(self) -> None:
        """As if the machine had lost its power, and had it back: no process, nothing in memory."""
        self.run("bash", "-c", _KILL_ALL, "kill", self.name)

    def end(self) -> None:
        self._holder.kill()  # --kill-child: its first process goes too, and all processes with that
        self._holder.wait()


@contextlib.contextmanager
def two_machines(shared: Path) -> Iterator[tuple[Machine, Machine]]:
    """Two machines with a link and a shared folder; all that was started there ends with the block."""
    with contextlib.ExitStack() as ending:
        machines = []
        for name, address in (("rlmux-a", "10.77.0.1"), ("rlmux-b", "10.77.0.2")):
            machines.append(Machine(name, address, shared))
            ending.callback(machines[-1].end)
        a, b = machines
        link = ["ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", str(b.first_pid)]
        subprocess.run(["nsenter", "-t", str(a.first_pid), "-n", *link], check=True)
        for machine in machines:
            machine.run("ip", "address", "add", f"{machine.address}/24", "dev", "eth0")
            machine.set_link(is_up=True)
        yield a, b


def rlmux_words(*words: str) -> Sequence[str]:
    """The words of `rlmux` in this environment."""
    return sys.executable, "-m", "rlmux", *words


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    ray = {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    return {**kept, **ray, "PYTHONPATH": str(Path(rlmux.__file__).parents[1])}
