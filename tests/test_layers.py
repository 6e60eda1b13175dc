"""The house: which room may import which, and what from outside. Read from the source, not from what ran.

cli    | service        words, and requests
api                     Python values: what a program may call
client                  what a run elsewhere is asked
papers | profiling | broker
sim    | runtime
       | engines
       | rl
report |
log    | policies
core          (config: the user's file; plugins: what users add by name; share: what other people's programs import;
              hidden_main: worker processes without the script that starts them;
              reaper: ends what outlives its owner)
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from tests.test_house import nodes_of

pytestmark = pytest.mark.xdist_group("house")  # one process reads the sources, once
SOURCE = Path(__file__).parent.parent / "src" / "rlmux"

TRAINING = {"torch", "transformers", "safetensors", "tokenizers"}
ROOMS: dict[str, tuple[set[str], set[str]]] = {
    # room: (what it may import of rlmux, what from outside)
    "core": (set(), set()),
    "policies": ({"core", "plugins"}, {"ortools"}),
    "log": ({"core"}, set()),
    "report": ({"core", "log"}, set()),
    "rl": (
        {"core.model", "core.errors", "core.json_text", "plugins", "reaper"},
        {*TRAINING, "annotated_types", "reasoning_gym", "gymnasium", "pyarrow", "starlette", "uvicorn", "httpx"},
    ),
    "engines": (
        {"core.model", "core.errors", "core.json_text", "rl", "reaper"},
        {*TRAINING, "numpy", "peft", "psutil", "pynvml", "torchao"},
    ),
    "sim": ({"core", "policies", "log", "report", "config", "plugins", "hidden_main"}, {"numpy", "psutil"}),
    "papers": ({"core", "policies", "log", "report", "sim"}, {"numpy"}),
    "runtime": (
        {"core", "policies", "log", "report", "rl", "engines", "config", "plugins", "hidden_main", "reaper"},
        {*TRAINING, "psutil", "pynvml", "tensorboard"},
    ),
    # The broker is a run whose workers are programs of others; `share` has the words that both ends say.
    "broker": ({"core", "log", "report", "runtime", "config", "share"}, set()),
    # the server that people leave running: HTTP and the wire formats of its clients, above the runtime that it drives
    "service": (
        {"core", "policies", "log", "report", "rl", "runtime", "config", "plugins", "broker"},
        {
            "fastapi",
            "starlette",
            "uvicorn",
            "h11",
            "pydantic",
            "google",
            "numpy",
            "prometheus_client",
            "apprise",
            "authlib",
            "joserfc",
            "httpx2",
        },
    ),
    "profiling": (
        {
            *(
                "core",
                "policies",
                "log.notes",
                "report",
                "rl",
                "engines",
                "sim.models",
                "runtime",
                "config",
                "hidden_main",
            )
        },
        TRAINING,
    ),
    "config": (
        {
            *("core.model", "core.queue_order", "core.errors", "core.json_text"),
            *("rl.config", "rl.memory.adapter_base", "rl.memory.model_shape", "plugins"),
        },
        {"pydantic", "pydantic_core", "annotated_types", "yaml"},
    ),
    # What a run elsewhere is asked, in its folder or over HTTP: the command line and the Python names share it.
    "client": ({"core", "log", "report", "runtime", "config"}, {"httpx", "yaml", "wandb", "mlflow", "trackio"}),
    "api": (
        {"core", "policies", "log", "report", "sim", "runtime", "profiling", "config", "plugins", "client"},
        {"yaml", "pandas"},
    ),
    "cli": (
        {
            *("core", "policies", "log", "report", "rl", "engines", "sim", "papers", "runtime", "profiling", "broker"),
            *("config", "plugins", "hidden_main", "service", "client", "api"),
        },
        {"typer", "rich", "psutil"},
    ),
}
ONLY_IN = {
    # outside package: modules that alone may import it
    "ray": lambda module: module.startswith("runtime.ray."),
    "torch": lambda module: module not in ("rl.config", "rl.types", "rl.vocabulary") and "rl.tasks" not in module,
    "peft": lambda module: module == "engines.adapters.lora",
    "torchao": lambda module: module == "engines.train.update.moments",
    "pynvml": lambda module: module in ("engines.servers.gpu_memory", "runtime.records.hardware"),
    "ortools": lambda module: module == "policies.search.linear_program",
    **dict.fromkeys(("starlette", "uvicorn"), lambda module: module.startswith(("service.", "rl.agents.gateway"))),
    **dict.fromkeys(("authlib", "joserfc", "httpx2"), lambda module: module == "service.dashboard.auth.oidc"),
    "apprise": lambda module: module == "service.dashboard.webhook",
    **dict.fromkeys(("wandb", "mlflow", "trackio"), lambda module: module == "client.trackers"),
}
EVERYWHERE = {"rlmux"}
"""The package itself, for its version."""
FLOORS: dict[str, tuple[set[str], ...]] = {
    # room: its modules and inner folders, floor by floor; each imports only what is below it
    "core": (
        {"model", "errors", "json_text", "decayed_usage"},
        {"actions", "queue_order"},
        {"events", "work"},
        {"journal", "estimation"},
        {"placement"},
        {"pipeline_run"},
        {"state"},
        {"decision"},
        {"queue"},
        {"steps", "query"},
        {"settle"},
        {"scheduler"},
        {"invariants"},
    ),
    "runtime": (
        {"backend"},
        {"fake_backend", "memory", "records", "weights"},
        {"workers"},
        {"orders"},
        {"control"},
        {"controller", "gpus_here", "mps", "worker_backend"},
        {"local"},
        {"machine_probe", "ray"},
        {"run"},
        {"launch"},
        {"checks"},
        {"model_export"},
    ),
}


def test_the_picture_and_the_table_of_the_docs_have_every_room():
    design = (SOURCE.parents[1] / "docs" / "how-it-works" / "design.md").read_text(encoding="utf-8")
    drawn = design.partition("## Rooms")[2].partition("```")[2].partition("```")[0]
    table = design.partition("| room | start reading at |")[2].partition("\n\n")[0]
    folders = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert folders == set(ROOMS)
    assert folders == set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
    assert folders <= set(re.findall(r"\w+", drawn))
    named = re.findall(r"`([\w/]+/(?:\w+\.py)?)", table)
    assert [path for path in named if not (SOURCE / path).exists()] == []


def modules() -> list[str]:
    names = [path.relative_to(SOURCE).with_suffix("").parts for path in sorted(SOURCE.rglob("*.py"))]
    return [".".join(parts) for parts in names if len(parts) > 1]


def imports(module: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, those inside functions included; those for type checkers too."""
    path = SOURCE.joinpath(*module.split(".")).with_suffix(".py")
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            name = node.module or ""
            yield node.lineno, name
            if name.startswith("rlmux"):
                yield from ((node.lineno, f"{name}.{alias.name}") for alias in node.names if is_module(name, alias))


def is_module(package: str, alias: ast.alias) -> bool:
    path = SOURCE.parent.joinpath(*package.split("."), alias.name)
    return path.with_suffix(".py").is_file() or path.is_dir()


@pytest.mark.parametrize("room", FLOORS)
def test_inside_a_room_a_module_imports_only_what_is_on_a_lower_floor(room):
    floor_of = {name: number for number, names in enumerate(FLOORS[room]) for name in names}
    upward = [
        f"{module}:{line}: {name}"
        for module in modules()
        if module.startswith(f"{room}.") and not module.endswith("__init__")
        for line, name in imports(module)
        if name.startswith(f"rlmux.{room}.") and (above := name.split(".")[2]) != (own := module.split(".")[1])
        if floor_of[above] >= floor_of[own]
    ]
    assert upward == []
    names = {module.split(".")[1] for module in modules() if module.startswith(f"{room}.")}
    assert set(floor_of) == names - {"__init__"}


def is_within(name: str, allowed: set[str]) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in allowed)


def complaint(module: str, name: str) -> str | None:
    """Why this import is not allowed; None if it is."""
    room = module.partition(".")[0]
    rooms, outside = ROOMS[room]
    package = name.partition(".")[0]
    if package == "rlmux":
        inside = name.removeprefix("rlmux").removeprefix(".")
        is_above = any(one.startswith(f"{inside}.") for one in rooms)
        if inside == "" or is_above or is_within(inside, {room, *rooms}):
            return None
        return f"{room} may import of rlmux: {', '.join(sorted(rooms)) or 'nothing'}"
    if package in sys.stdlib_module_names:
        return None
    if package in ONLY_IN:
        if ONLY_IN[package](module) and (package in outside or package in ("ray", "ortools")):
            return None
        return f"{package} is not imported here"
    return None if package in outside else f"{room} may import from outside: {', '.join(sorted(outside)) or 'nothing'}"


def test_imports_point_down_the_house():
    wrong = [
        f"{module}, line {line}: import of {name}: {why}"
        for module in modules()
        for line, name in imports(module)
        if (why := complaint(module, name)) is not None
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def test_modules_that_children_import_by_a_string_are_there():
    """Code in a string, and names of modules to preload or run: no type checker looks for these."""
    missing = []
    sources = ((path, nodes_of(path)) for path in sorted(SOURCE.rglob("*.py")))
    tests = ((path, nodes_of_test(path)) for path in sorted(SOURCE.parents[1].glob("tests/**/*.py")))
    for path, nodes in chain(sources, tests):
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "from rlmux" in node.value:
                for package, name in re.findall(r"from (rlmux[\w.]*) import (\w+)", node.value):
                    missing += [] if exists(package, name) else [f"{path.name}:{node.lineno}: {package}.{name}"]
    assert not missing, missing


def nodes_of_test(path: Path) -> Iterator[ast.AST]:
    """Not kept: no other test needs them."""
    return ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def exists(package: str, name: str) -> bool:
    place = SOURCE.parent.joinpath(*package.split("."))
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    is_inside = (place / f"{name}.py").is_file() or (place / name).is_dir()
    return is_inside or (file.is_file() and re.search(rf"\b{name}\b", file.read_text(encoding="utf-8")) is not None)


def test_every_room_is_in_the_table():
    folders = [path for path in SOURCE.iterdir() if path.is_dir() and not path.is_symlink()]  # examples are a link
    rooms = {path.name for path in folders if any(path.rglob("*.py"))}
    assert rooms <= set(ROOMS)


@pytest.mark.parametrize(
    ("module", "name", "is_allowed"),
    [
        ("core.scheduler", "rlmux.log.run_log", False),
        ("core.scheduler", "numpy", False),
        ("core.scheduler", "heapq", True),
        ("config.load", "rlmux.core.model", True),
        ("config.load", "rlmux.policies", False),
        ("config.load", "rlmux.rl.tasks", False),
        ("sim.world", "rlmux.runtime.backend", False),
        ("runtime.local", "ray", False),
        ("runtime.ray.ray_backend", "ray", True),
        ("rl.tasks.base", "torch", False),
        ("rl.algorithms", "torch", True),
    ],
)
def test_the_check_itself_tells_right_from_wrong(module, name, is_allowed):
    assert (complaint(module, name) is None) is is_allowed


FREE_TO_COPY = {
    # One file would be longer than the house allows: the client is one, and what names torch or a framework the other.
    "share.py": set(),
    "share_adapters.py": {"ray", "torch"},
    "share_areal.py": {"areal"},
    "share_openrlhf.py": {"ray", "torch", "openrlhf"},
    "share_skyrl.py": {"ray", "skyrl"},
    "share_slime.py": set(),
    "share_trl.py": {"torch", "transformers"},
    "share_verl.py": {"ray"},
}


@pytest.mark.parametrize("name", FREE_TO_COPY)
def test_what_other_programs_copy_imports_nothing_of_ours_and_runs_on_python_3_9(name):
    tree = ast.parse((SOURCE / name).read_text(encoding="utf-8"), feature_version=(3, 9))
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in imported if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in imported if isinstance(node, ast.ImportFrom)}
    outside = {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names)
    assert outside <= FREE_TO_COPY[name]
    at_the_top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not {alias.name for node in at_the_top for alias in node.names} & FREE_TO_COPY[name]


def test_share_alone_in_a_folder_works_without_any_package(tmp_path):
    (tmp_path / "share.py").write_text((SOURCE / "share.py").read_text(encoding="utf-8"), encoding="utf-8")
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}]; import share; job = share.join('a')\n"
    code += "with job.phase('train'), job.phase(None): job.safe_point()\n"
    code += "print(job.is_shared, sorted(set(sys.modules) & {'torch', 'rlmux', 'asyncio', 'share_adapters'}))"
    command = [sys.executable, "-S", "-I", "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env={})
    assert ran.stdout.strip() == "False []"


WITHOUT_TORCH = "import sys; sys.modules.update(torch=None, transformers=None)\n"


@pytest.mark.parametrize(
    "code",
    [
        "import rlmux",
        "import rlmux.sim.api, rlmux.report.reports, rlmux.config, rlmux.core.scheduler",
        "from rlmux.cli import main; main(['--help'])",
        "from rlmux.cli import main; main(['simulate', '--help'])",
        "from rlmux.cli import main; main(['plan', '--help'])",
        "from rlmux.cli import main; main(['plan', 'examples/07_cluster_what_if.yaml'])",
        "from rlmux.cli import main; main(['simulate', 'examples/07_cluster_what_if.yaml', '--policies', 'rollmux'])",
    ],
)
def test_what_needs_no_torch_works_without_it(code):
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH + code], capture_output=True, text=True, cwd=SOURCE.parent.parent
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    "module", ["rlmux", "rlmux.core.scheduler", "rlmux.config", "rlmux.cli.commands", "rlmux.broker.broker_run"]
)
def test_light_modules_import_nothing_heavy(module):
    heavy = sorted({"torch", "transformers", "numpy", "ray", "reasoning_gym"})
    code = f"import sys, {module}; print([name for name in {heavy!r} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


HEAVY = {
    *("torch", "transformers", "peft", "accelerate", "numpy", "pandas", "ray", "reasoning_gym"),
    *("fastapi", "starlette", "uvicorn", "httpx", "prometheus_client", "psutil", "pydantic", "rich", "yaml"),
    *("asyncio", "concurrent", "multiprocessing", "sqlite3", "unittest"),
}
"""Packages that take from ten milliseconds to seconds to import."""
READING = {"pydantic", "psutil", "yaml"}


@pytest.mark.parametrize(
    ("words", "heavy", "most_modules"),
    [
        (["--help"], set(), 200),
        (["run", "--help"], {"pydantic"}, 310),  # typer's, for the types of options
        (["plan", "examples/07_cluster_what_if.yaml"], {*READING, "rich"}, 590),
        (
            ["check", "examples/01_two_pipelines.yaml"],
            {*READING, "asyncio", "concurrent", "multiprocessing", "sqlite3"},
            720,
        ),
    ],
    ids=["help", "run-help", "plan", "check"],
)
def test_a_command_imports_what_it_needs_and_no_more(words, heavy, most_modules):
    code = f"import sys\nfrom rlmux.cli import main\ntry: main({words!r})\n"
    code += f"finally: print([name for name in {sorted(HEAVY)!r} if name in sys.modules], len(sys.modules), sep='\\n')"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=SOURCE.parent.parent
    )
    loaded, num_modules = ran.stdout.splitlines()[-2:]
    assert set(ast.literal_eval(loaded)) <= heavy
    assert int(num_modules) <= most_modules
