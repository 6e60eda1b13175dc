"""`rlmux init checkpoint --gpus`: a file that plans and fits the machine, or one line with what would."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoints import CONFIG, write_checkpoint
from tests.server_environments import make_environment

from rlmux.cli import inputs, starting_points
from rlmux.cli.gpu_start import file_text, machine
from rlmux.cli.starting_points import ForGpus
from rlmux.config import Purpose, Spec
from rlmux.core.errors import UserError
from rlmux.profiling import gpu_choice
from rlmux.runtime import gpus_here

QWEN3 = {
    # hidden size, layers, heads, key heads, width, whether embeddings are tied
    "Qwen3-0.6B": (1024, 28, 16, 8, 3072, True),
    "Qwen3-1.7B": (2048, 28, 16, 8, 6144, True),
    "Qwen3-4B": (2560, 36, 32, 8, 9728, True),
    "Qwen3-8B": (4096, 36, 32, 8, 12288, False),
    "Qwen3-14B": (5120, 40, 40, 8, 17408, False),
    "Qwen3-32B": (5120, 64, 64, 8, 25600, False),
    "Qwen3-30B-A3B": (2048, 48, 32, 4, 6144, False),
}
OTHERS = {
    # type, hidden size, layers, heads, key heads, width, vocabulary, positions
    "Meta-Llama-3-8B": ("llama", 4096, 32, 32, 8, 14336, 128256, 8192),
    "Llama-3.3-70B": ("llama", 8192, 80, 64, 8, 28672, 128256, 131072),
    "Mistral-7B-v0.3": ("mistral", 4096, 32, 32, 8, 14336, 32768, 32768),
}
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
KEYS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
MACHINES = [f"{number}x{memory}" for number in (1, 2, 4, 8) for memory in (40, 80, 141)]
TABLE = [name for name in (*QWEN3, *OTHERS) if name != "Llama-3.3-70B"]


def config_of(name: str) -> dict[str, Any]:
    if name in OTHERS:
        model_type, *sizes, vocabulary, positions = OTHERS[name]
        known = {"model_type": model_type, "vocab_size": vocabulary, "max_position_embeddings": positions}
        return {**known, **dict(zip(KEYS, sizes, strict=True))}
    *sizes, is_tied = QWEN3[name]
    known = {"model_type": "qwen3", "vocab_size": 151936, "max_position_embeddings": 40960, "head_dim": 128}
    experts = EXPERTS if name == "Qwen3-30B-A3B" else {}
    return {**known, "tie_word_embeddings": is_tied, **dict(zip(KEYS, sizes, strict=True)), **experts}


@pytest.fixture
def model(folder: Path) -> Callable[[str], Path]:
    """Makes a folder with the config.json of a model, and no weights."""

    def make(name: str) -> Path:
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config_of(name)))
        return folder / name

    return make


def written(model: Path, gpus: str, *, lora: bool = False, pipelines: int | None = None) -> Path:
    """The file; raises UserError where nothing is written. What exists is written again."""
    out = model.parent / f"{model.name}-{gpus}{'-lora' if lora else ''}.yaml"
    out.unlink(missing_ok=True)
    for_gpus = ForGpus(gpus=gpus, num_pipelines=pipelines, has_adapter=lora)
    starting_points.write("checkpoint", out, model, for_gpus=for_gpus)
    return out


def planned(file: Path) -> Spec:
    """As `plan` reads it: with figures, and the memory check passed."""
    return inputs.load(str(file), purpose=Purpose.PLAN)


@pytest.mark.parametrize("lora", [False, True], ids=["all", "lora"])
@pytest.mark.parametrize("name", TABLE)
def test_each_machine_gets_a_file_that_fits_or_an_offer_that_does(model, name, lora):
    checkpoint, proven = model(name), set()
    for gpus in MACHINES:
        try:
            written(checkpoint, gpus, lora=lora)  # which loads it, and adds its memory up as `run` does
        except UserError as error:
            refused = str(error)
            assert re.match(rf"{name} on .+ needs \d+ GB on .+, and there are \d+ of \d+; accepted: ", refused)
            offers = re.findall(r"--gpus (\w+)|(--lora)", refused)
            assert offers, "a line without an offer helps nobody"
            for larger, adapter in offers:
                offered = (larger or gpus, lora or bool(adapter))
                if offered not in proven:
                    written(checkpoint, offered[0], lora=offered[1])
                    proven.add(offered)
    assert {path.name for path in checkpoint.iterdir()} == {"config.json"}


@pytest.mark.parametrize(
    ("name", "gpus", "lora"),
    [
        ("Qwen3-0.6B", "1x40", False),
        ("Qwen3-8B", "8x80", False),
        ("Qwen3-32B", "8x141", True),
        ("Qwen3-8B", "1x80", True),
    ],
)
def test_plan_has_figures_for_what_was_written(model, name, gpus, lora):
    spec = planned(written(model(name), gpus, lora=lora))
    assert len(spec.pipelines) == 2
    for pipeline in spec.pipelines:
        assert {"rollout_s", "train_s", "limit_rollout_s"} <= {figure.name for figure in pipeline.figures}
        training = pipeline.config
        assert (training.rollout.dtype, training.train.dtype, training.num_steps) == ("bfloat16", "bfloat16", 200)
        assert training.algorithm.learning_rate == (1e-5 if lora else 1e-6)
        assert (training.adapter is not None) == lora
    devices = sum((pool.num_nodes or 0) * pool.gpus_per_node for pool in spec.cluster.pools.values())
    assert devices == int(gpus.partition("x")[0])


def test_an_8b_model_on_eight_gpus_is_sharded_over_four_of_them(model):
    training = planned(written(model("Qwen3-8B"), "8xH100")).pipelines[0].config
    assert (training.rollout.num_workers, training.train.num_workers) == (4, 4)
    assert (training.train.sharding, training.train.activation_checkpointing) == ("shard", True)
    assert training.rollout.kv_tokens is not None
    assert training.rollout.kv_tokens % 10_000 == 0
    assert training.rollout.num_slots == 64, "the 256 answers of a step over four devices"
    assert (training.rollout.max_prompt_tokens, training.rollout.max_new_tokens) == (1024, 7168)


def test_a_model_that_fits_no_gpu_is_sampled_by_a_server_that_is_to_be_named(rlmux, model):
    model("Llama-3.3-70B")
    said = rlmux("init", "checkpoint", "--model", "Llama-3.3-70B", "--gpus", "8x141", "--lora")
    assert said.code == 0, said.err
    assert said.out.splitlines()[:2] == [
        "# put the weights into Llama-3.3-70B; plan needs none",
        "# write the python of an environment with vLLM over PATH_OF_ITS_PYTHON, in rlmux.yaml",
    ]
    training = planned(Path("rlmux.yaml")).pipelines[0].config
    assert training.rollout.engine.name == "vllm"
    assert training.rollout.tensor_parallel > 1
    assert training.rollout.kv_tokens is None
    text = Path("rlmux.yaml").read_text(encoding="utf-8")
    assert (
        "\n# For training rlmux has shards (FSDP2), not Megatron's TP, PP, EP and CP: docs/how-to/your-trainer.md.\n"
        in text
    )


def test_a_server_that_is_named_has_slots_of_full_length_and_no_kv_tokens(rlmux, folder, tmp_path_factory):
    write_checkpoint(folder / "tiny")
    (folder / "tiny" / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["Qwen3ForCausalLM"]}))
    python = make_environment(tmp_path_factory.mktemp("named"), "vllm")
    said = rlmux("init", "checkpoint", "--model", "tiny", "--gpus", "4x80", "--engine", "vllm", "--python", python)
    assert said.code == 0, said.err
    rollout = planned(folder / "rlmux.yaml").pipelines[0].config.rollout
    assert (rollout.engine.name, rollout.engine.python, rollout.kv_tokens) == ("vllm", python, None)
    assert rollout.num_slots >= 64


def test_init_and_plan_of_its_file_need_no_torch(folder, model):
    file = str(folder / "rlmux.yaml")
    words = ["init", "checkpoint", "--model", str(model("Qwen3-8B")), "--gpus", "8x80", "--out", file]
    code = "import sys; sys.modules.update(torch=None, transformers=None)\n"
    code += "from rlmux.cli.main import run_command_line\n"
    code += f"assert run_command_line({words!r}) == 0\nassert run_command_line({['plan', file]!r}) == 0"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert ran.returncode == 0, ran.stderr


def test_positions_of_a_short_model_bound_prompts_and_answers(rlmux, folder):
    write_checkpoint(folder / "tiny")
    assert rlmux("init", "checkpoint", "--model", "tiny", "--gpus", "2x80").code == 0
    rollout = planned(folder / "rlmux.yaml").pipelines[0].config.rollout
    assert (rollout.max_prompt_tokens, rollout.max_new_tokens) == (64, 64)


@pytest.mark.parametrize("packages", [True, False], ids=["reasoning-gym", "built-in"])
def test_as_many_pipelines_as_asked_for_have_names_and_tasks_of_their_own(model, packages, monkeypatch):
    if not packages:
        monkeypatch.setattr(file_text, "find_spec", lambda _: None)
    for number in (1, 3, 8):
        spec = planned(written(model("Qwen3-0.6B"), "2x80", pipelines=number))
        tasks = [pipeline.config.task for pipeline in spec.pipelines]
        assert len({pipeline.name for pipeline in spec.pipelines}) == len({str(task) for task in tasks}) == number
        assert all(task.name.startswith("reasoning-gym:") == packages for task in tasks)


@pytest.mark.parametrize("packages", [True, False], ids=["reasoning-gym", "built-in"])
def test_each_task_of_the_file_can_be_made(model, packages, monkeypatch):
    from rlmux.rl.tasks import make_task
    from rlmux.rl.vocabulary import CharVocabulary

    if packages:
        pytest.importorskip("reasoning_gym")
    else:
        monkeypatch.setattr(file_text, "find_spec", lambda _: None)
    spec = planned(written(model("Qwen3-0.6B"), "2x80", pipelines=8))
    for pipeline in spec.pipelines:
        task = make_task(pipeline.config.task, seed=1, vocabulary=CharVocabulary())
        assert task.prompt(0).text


def test_every_key_that_was_chosen_has_a_comment(model):
    text = written(model("Qwen3-8B"), "8x80").read_text(encoding="utf-8")
    body = text.partition("defaults:")[2].partition("pipelines:")[0].splitlines()
    silent = [line for line in body if ": " in line and "#" not in line]
    assert silent == ["    name: grpo"]
    assert "$" not in text
    assert max(len(line) for line in body if "path: " not in line) <= 120
    assert re.match(
        r"# Qwen3-8B on 8 H100 of 80 GB: 2 pipelines .+\n#\n#   rlmux check .+\n#   rlmux plan .+\n#   rlmux run ", text
    )
    assert "A100-80GB or H800 has as much memory" in text


def test_pipelines_that_the_host_cannot_hold_together_are_said_to_wait(model):
    waiting = written(model("Qwen3-8B"), "4x80").read_text(encoding="utf-8")
    assert re.search(
        r"\n# Host memory holds the states of one pipeline: \d+ GB for each GPU and pipeline; others wait", waiting
    )
    assert "# Host memory" not in written(model("Qwen3-8B"), "8x80").read_text(encoding="utf-8")
    assert "pipelines:                    # on the GPUs one at a time\n" in waiting
    unknown = written(model("Qwen3-30B-A3B"), "8x80").read_text(encoding="utf-8")
    assert re.search(r"\n# Host memory is not counted: for each GPU a pipeline needs \d+ GB, of 90 % of ", unknown)
    assert "host_memory_gb: 220" not in unknown


def test_the_same_words_give_the_same_file(model):
    first = written(model("Qwen3-4B"), "4x80").read_bytes()
    assert written(model("Qwen3-4B"), "4x80").read_bytes() == first


@pytest.mark.parametrize("text", ["8", "0x80", "8xV100", "8x", "x80", "17x80", "8x81", "1.5x80", ""])
def test_gpus_that_are_not_known_are_one_line_with_those_that_are(rlmux, model, text):
    model("Qwen3-8B")
    code, out, err = rlmux("init", "checkpoint", "--model", "Qwen3-8B", "--gpus", text)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(
        f"rlmux: --gpus {text!r}: accepted: from 1 to 16 GPUs as NUMBERxGB, such as 8x80, with 40, 48, 80"
    )
    assert err.endswith("A100-80GB, A100-40GB, H100, H200, H800, H20, B200, L40S\n")
    assert not Path("rlmux.yaml").exists()


@pytest.mark.parametrize(
    ("text", "gpu"),
    [("8x40", "A100-40GB"), ("8x48", "L40S"), ("1x80", "H100"), ("2x96", "H20"), ("4x141", "H200"), ("8X180", "B200"),
     ("4xa100-40gb", "A100-40GB"), ("8xH800", "H800")],
)  # fmt: skip
def test_a_number_stands_for_the_usual_gpu_with_that_memory(text, gpu):
    found = machine.machine_of(text)
    assert (found.gpu, found.num_gpus) == (gpu, int(text[0]))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["rows", "--gpus", "8x80"], "--gpus 8x80: does not go with rows; accepted: rlmux init checkpoint --model DIR"),
        (["tasks", "--pipelines", "3"], "--pipelines 3: does not go with tasks; accepted: "),
        (["trl", "--lora"], "--lora: does not go with trl; accepted: "),
        (
            ["checkpoint", "--model", "Qwen3-8B", "--lora"],
            "--lora: no GPU of a known kind is here; accepted with --gpus",
        ),
        (["checkpoint", "--gpus", "8x80"], "--model is missing; accepted: rlmux init checkpoint --model DIR, "),
        (["checkpoint", "--model", "none", "--gpus", "8x80"], "--model none: no such folder (none); accepted: "),
        (["checkpoint", "--model", ".", "--gpus", "8x80"], "--model .: the folder has no config.json (.); accepted: "),
        (
            ["checkpoint", "--model", "other", "--gpus", "8x80"],
            "--model other: other/config.json has model_type 'phi', which our own rollout engine does not compute; "
            "accepted: qwen3, llama, qwen2, mistral, qwen3_moe; vLLM and SGLang serve others",
        ),
        (
            ["checkpoint", "--model", "Qwen3-8B", "--gpus", "8x80", "--out", "small.yaml"],
            "small.yaml: exists; accepted: --out FILE in a folder without small.yaml",
        ),
        (
            ["checkpoint", "--model", "Qwen3-8B", "--gpus", "8x80", "--pipelines", "9"],
            "Invalid value for '--pipelines'",
        ),
        (
            ["checkpoint", "--model", "Qwen3-32B", "--gpus", "8x80"],
            "Qwen3-32B on 8 H100 of 80 GB: training all of its 32.8B parameters needs 81 GB on each of 4 GPUs, and "
            "there are 75 of 80; accepted: --lora, --gpus 8x141, or a trainer with tensor, pipeline or expert "
            "parallelism under permits (docs/how-to/your-trainer.md)",
        ),
    ],
)
def test_a_mistake_with_gpus_is_one_line_and_nothing_is_written(rlmux, folder, model, words, line):
    model("Qwen3-8B"), model("Qwen3-32B")
    write_checkpoint(folder / "other")
    config = json.loads((folder / "other" / "config.json").read_text())
    (folder / "other" / "config.json").write_text(json.dumps(config | {"model_type": "phi"}))
    there, small = set(folder.iterdir()), (folder / "small.yaml").read_bytes()
    code, out, err = rlmux("init", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"rlmux: {line}")
    assert set(folder.iterdir()) == there
    assert (folder / "small.yaml").read_bytes() == small


def test_json_has_the_commands_and_what_is_to_be_done_before(rlmux, model):
    model("Qwen3-8B")
    code, out, err = rlmux("init", "checkpoint", "--model", "Qwen3-8B", "--gpus", "8x80", "--json")
    assert (code, err) == (0, "")
    weights, *commands = json.loads(out)["next"]
    assert weights == "# put the weights into Qwen3-8B; plan needs none"
    assert commands == [f"rlmux {command} rlmux.yaml" for command in ("check", "plan", "run")]


def test_a_folder_may_have_any_name(rlmux, folder, model):
    model("Qwen3-8B").rename(folder / "my $model {8B}")
    said = rlmux("init", "checkpoint", "--model", "my $model {8B}", "--gpus", "8x80", "--out", "a b/{c}.yaml")
    assert said.out.splitlines()[0] == "# put the weights into 'my $model {8B}'; plan needs none"
    assert said.out.splitlines()[-1] == "rlmux run 'a b/{c}.yaml'"
    assert len(planned(folder / "a b" / "{c}.yaml").pipelines) == 2


def test_this_machines_gpus_are_taken_where_none_are_named(rlmux, folder, monkeypatch):
    write_checkpoint(folder / "tiny")
    monkeypatch.setenv("PATH", str(folder / "nowhere"))
    monkeypatch.setattr(gpus_here, "visible_gpus", lambda: ["0", "1"])
    monkeypatch.setattr(gpus_here, "name_of_gpu", lambda: "NVIDIA A100-SXM4-40GB")
    said = rlmux("init", "checkpoint", "--model", "tiny", "--lora")
    assert said.out.splitlines()[0] == "rlmux check rlmux.yaml", "the weights are there"
    text = (folder / "rlmux.yaml").read_text(encoding="utf-8")
    assert "tiny on 2 A100-40GB of 40 GB" in text
    assert "this machine's part" in text
    assert "    # engine: {name: vllm, python: PATH}" in text
    assert planned(folder / "rlmux.yaml").pipelines[0].config.adapter is not None


def test_on_cores_the_file_stays_small_and_plans(rlmux, folder):
    write_checkpoint(folder / "tiny")
    said = rlmux("init", "checkpoint", "--model", "tiny")
    assert said.out.splitlines() == [f"rlmux {command} rlmux.yaml" for command in ("check", "plan", "run")]
    assert rlmux("plan", "rlmux.yaml").code == 0
    assert len((folder / "rlmux.yaml").read_text(encoding="utf-8").splitlines()) < 45


def test_plan_notes_that_training_30b_parameters_wants_more_than_shards(rlmux, model):
    for lora, number in ((False, 1), (True, 0)):
        file = written(model("Qwen3-32B"), "8x141", lora=lora)
        notes = [line for line in rlmux("plan", str(file)).out.splitlines() if "Megatron" in line]
        assert len(notes) == number
        assert all(line.startswith("note: countdown, chain_sum: 30B parameters or more are trained") for line in notes)


def test_of_the_splits_the_one_with_the_shortest_cycle_is_taken(model):
    found = gpu_choice.Wanted(
        model=model("Qwen3-4B"), model_type="qwen3", max_positions=40960, machine=machine.machine_of("8x80")
    )
    best = gpu_choice.choose(found)
    assert best is not None
    tokens = gpu_choice.lengths(found)[0]
    others = [
        each
        for split in gpu_choice.splits(found, found.engine)
        for each in gpu_choice._fitted(found, split, found.engine, tokens, [1, 2])
    ]
    assert len({(each.split.num_rollout, each.split.num_train) for each in others}) > 1
    assert best.cycle_s == min(each.cycle_s for each in others)
