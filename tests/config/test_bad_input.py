"""Every mistake is one line that names file, line, key, value, and what is accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlmux.config import Purpose, load_spec
from rlmux.core.errors import SpecError

WHOLE_NUMBER = "a whole number, 1 or more"
NAMES = "1 to 64 letters, digits, '-' and '_', as it names a folder"
CASES = {
    "unknown key": (
        [("slots: 32", "slot: 32")],
        "two.yaml:11: pipelines.sort.rollout.slot is 32: unknown key; nearest: slots; "
        "accepted: workers, max_new_tokens, max_prompt_tokens, temperature, slots",
    ),
    "unknown key at the top": (
        [("pipelines:\n", "pipeline:\n")],
        "two.yaml:7: pipeline is a list of 2: unknown key; nearest: pipelines; accepted: cluster, code_folde",
    ),
    "unknown key in the defaults": (
        [("steps: 60", "step: 60")],
        "two.yaml:6: pipelines.sort.step is 60: unknown key; nearest: steps; accepted: name, seed, steps,",
    ),
    "an adapter beside a projection that the model does not have": (
        [("steps: 60", "adapter: {rank: 4, alpha: 8, targets: [q_proj, c_attn]}")],
        "two.yaml:6: pipelines.sort.adapter.targets.1 is 'c_attn'; accepted: one of q_proj, k_proj, v_proj, o_proj, ",
    ),
    "an adapter of rank 0": (
        [("steps: 60", "adapter: {rank: 0, alpha: 8}")],
        f"two.yaml:6: pipelines.sort.adapter.rank is 0; accepted: {WHOLE_NUMBER}, 1024 or less",
    ),
    "an adapter without alpha": (
        [("steps: 60", "adapter: {rank: 4}")],
        "two.yaml:6: pipelines.sort.adapter.alpha is missing; accepted: a number, more than 0",
    ),
    "an adapter twice beside one projection": (
        [("steps: 60", "adapter: {rank: 4, alpha: 8, targets: [q_proj, q_proj]}")],
        "two.yaml:6: pipelines.sort.adapter.targets is a list of 2; accepted: each of q_proj, k_proj, v_proj, o_proj,",
    ),
    "wrong type": (
        [("steps: 60", "steps: many")],
        f"two.yaml:6: pipelines.sort.steps is 'many'; accepted: {WHOLE_NUMBER}",
    ),
    "a quoted number": (
        [("steps: 60", "steps: '60'")],
        f"two.yaml:6: pipelines.sort.steps is '60'; accepted: {WHOLE_NUMBER}",
    ),
    "a truth value as a number": (
        [("steps: 60", "steps: true")],
        f"two.yaml:6: pipelines.sort.steps is true; accepted: {WHOLE_NUMBER}",
    ),
    "a fraction": (
        [("steps: 60", "steps: 1.5")],
        f"two.yaml:6: pipelines.sort.steps is 1.5; accepted: {WHOLE_NUMBER}",
    ),
    "no value": (
        [("slots: 32", "slots:")],
        "two.yaml:11: pipelines.sort.rollout.slots is empty; accepted: a whole number, 1 or more, 4096 or le",
    ),
    "zero devices": (
        [("rollout: {devices: 1}", "rollout: {devices: 0}")],
        f"two.yaml:3: cluster.pools.rollout.devices is 0; accepted: {WHOLE_NUMBER}",
    ),
    "out of range": (
        [("slots: 32", "temperature: -0.5")],
        "two.yaml:11: pipelines.sort.rollout.temperature is -0.5; accepted: a number, more than 0, 10 or les",
    ),
    "not a number": (
        [("slots: 32", "temperature: .nan")],
        "two.yaml:11: pipelines.sort.rollout.temperature is nan; accepted: a number, more than 0, 10 or less",
    ),
    "an SLO below one": (
        [("steps: 60", "slo_slowdown: 0.9")],
        "two.yaml:6: pipelines.sort.slo_slowdown is 0.9; accepted: a number, 1 or more",
    ),
    "a certain SLO": (
        [("steps: 60", "slo_probability: 1")],
        "two.yaml:6: pipelines.sort.slo_probability is 1; accepted: a number above 0 and below 1, or mean",
    ),
    "an SLO by a word of YAML": (
        [("steps: 60", "slo_probability: true")],
        "two.yaml:6: pipelines.sort.slo_probability is true; accepted: a number above 0 and below 1, or mean",
    ),
    "a token limit below the mean": (
        [("steps: 60", "estimate: {rollout_s: 3, train_s: 2, limit_rollout_s: 2, limit_train_s: 2}")],
        "two.yaml:6: pipelines.sort.estimate.limit_rollout_s is 2; accepted: 3, the seconds of a mean step, or more",
    ),
    "half a token limit": (
        [("steps: 60", "estimate: {rollout_s: 3, train_s: 2, limit_rollout_s: 4}")],
        "two.yaml:6: pipelines.sort.estimate.limit_rollout_s is 4; accepted: limit_rollout_s and limit_train_s",
    ),
    "a list for a mapping": (
        [("    rollout:\n      slots: 32\n", "    rollout: [slots]\n")],
        "two.yaml:10: pipelines.sort.rollout is a list of 1; accepted: a mapping",
    ),
    "a mapping for a list": (
        [("pipelines:\n  - name: sort", "pipelines:\n  sort: 1\nx:\n  - name: sort")],
        "two.yaml:7: pipelines is a mapping; accepted: a list of mappings, at least 1",
    ),
    "a text for a pipeline": (
        [("  - name: reverse\n    task: reverse\n", "  - reverse\n")],
        "two.yaml:12: pipelines.1 is 'reverse'; accepted: a mapping",
    ),
    "two pipelines of one name": (
        [("name: reverse", "name: sort")],
        "two.yaml:12: pipelines.sort.name is 'sort', which two.yaml:8 has too; accepted: a name for each pip",
    ),
    "no name": (
        [("- name: reverse\n    task", "- task")],
        f"two.yaml:12: pipelines.1.name is missing; accepted: {NAMES}",
    ),
    "a name that is no folder": (
        [("name: reverse", "name: ../up")],
        f"two.yaml:12: pipelines.../up.name is '../up'; accepted: {NAMES}",
    ),
    "a pool name that is no name": (
        [("    train: {devices: 1}", "    'a b': {devices: 1}")],
        f"two.yaml:4: cluster.pools.a b cannot be a name; accepted: {NAMES}",
    ),
    "nothing at all to train": (
        [("pipelines:\n  - name", "x:\n  - name")],
        "two.yaml:7: x is a list of 2: unknown key; accepted: cluster, code_folder, policy, shares, trackers, keep, "
        "defaults, pipelines",
    ),
    "no task": (
        [("\n    task: reverse", "")],
        "two.yaml:12: pipelines.reverse.task is missing; accepted: a task's name, or a mapping (docs/reference/file.md",
    ),
    "an unknown algorithm": (
        [("    task: reverse", "    task: reverse\n    algorithm: ppo")],
        "two.yaml:14: pipelines.reverse.algorithm.name is 'ppo'; accepted: one of grpo, dr-grpo, rloo",
    ),
    "no training pool": (
        [("    train: {devices: 1}\n", "")],
        "two.yaml:2: cluster.pools is a mapping: no pool for train; accepted: one pool for rollout and one f",
    ),
    "two pools of a phase": (
        [("train: {devices: 1}", "train: {phase: rollout, devices: 1}")],
        "two.yaml:4: cluster.pools.train is a mapping: a second pool for rollout beside 'rollout'; accepted:",
    ),
    "a pool without a phase": (
        [("    train: {devices: 1}", "    h800: {devices: 1}")],
        "two.yaml:4: cluster.pools.h800 is a mapping: no phase; accepted: phase: rollout, or phase: train",
    ),
    "a pool beside one for both phases": (
        [("train: {devices: 1}", "gpus: {phase: both, devices: 1}")],
        "two.yaml:3: cluster.pools.rollout is a mapping: a pool beside 'gpus', which serves both phases; accepted: that"
        " pool alone, or one for rollout and one for train",
    ),
    "devices and nodes": (
        [("train: {devices: 1}", "train: {devices: 1, nodes: 2}")],
        "two.yaml:4: cluster.pools.train.nodes is 2: does not go with 'devices'; accepted: devices or nodes",
    ),
    "a pool without a size": (
        [("train: {devices: 1}", "train: {}")],
        f"two.yaml:4: cluster.pools.train.devices is missing; accepted: {WHOLE_NUMBER}",
    ),
    "more workers than devices": (
        [("slots: 32", "workers: 2")],
        "two.yaml:11: pipelines.sort.rollout.workers is 2; accepted: up to 1, the size of pool 'rollout'",
    ),
    "training workers that cannot be paired": (
        [
            ("    train: {devices: 1}", "    train: {devices: 4}"),
            ("    rollout:\n", "    train: {workers: 3}\n    rollout:\n"),
        ],
        "two.yaml:10: pipelines.sort.train.workers is 3: gradients are summed in pairs of ranks; accepted: 2 or 4",
    ),
    "training workers without a micro-batch": (
        [
            ("    train: {devices: 1}", "    train: {devices: 16}"),
            ("    rollout:\n", "    train: {workers: 16}\n    rollout:\n"),
        ],
        "two.yaml:10: pipelines.sort.train.workers is 16: an update has 4 micro-batches "
        "(algorithm.micro_batch_size 32), and some ranks would have none; accepted: up to 4, "
        "or a smaller algorithm.micro_batch_size",
    ),
    "a model in parts on one worker": (
        [("    rollout:\n", "    train: {sharding: shard}\n    rollout:\n")],
        "two.yaml:10: pipelines.sort.train.sharding is 'shard' with one worker; accepted: replicate, or train.workers",
    ),
    "a model in parts that is equal across ranks": (
        [
            ("    train: {devices: 1}", "    train: {devices: 2}"),
            ("    rollout:\n", "    train: {sharding: shard, workers: 2, equal_across_ranks: true}\n    rollout:\n"),
        ],
        "two.yaml:10: pipelines.sort.train.equal_across_ranks is true, which does not go with sharding: shard; "
        "accepted: false, or sharding: replicate",
    ),
    "moments on a disk": (
        [("    rollout:\n", "    train: {optimizer_state: disk}\n    rollout:\n")],
        "two.yaml:10: pipelines.sort.train.optimizer_state is 'disk'; accepted: one of device, cpu, 8bit",
    ),
    "more training workers than devices": (
        [("    rollout:\n", "    train: {workers: 2}\n    rollout:\n")],
        "two.yaml:10: pipelines.sort.train.workers is 2; accepted: up to 1, the size of pool 'train'",
    ),
    "heads that do not divide": (
        [("steps: 60", "model: {heads: 5}")],
        "two.yaml:6: pipelines.sort.model.heads is 5; accepted: a divisor of half of hidden_size 64",
    ),
    "a width that the default heads do not divide": (
        [("steps: 60", "model: {hidden_size: 30}")],
        "two.yaml:6: pipelines.sort.model.hidden_size is 30; accepted: a multiple of 8, twice the heads",
    ),
    "heads that the default key/value heads do not divide": (
        [("steps: 60", "model: {heads: 1}")],
        "two.yaml:6: pipelines.sort.model.heads is 1; accepted: a multiple of kv_heads 2",
    ),
    "mini-batches that do not divide the prompts of a step": (
        [("steps: 60", "algorithm: {minibatches: 5}")],
        "two.yaml:6: pipelines.sort.algorithm.minibatches is 5; accepted: a divisor of prompts_per_step 16",
    ),
    "prompts of a step that the mini-batches do not divide": (
        [("steps: 60", "algorithm: {prompts_per_step: 6, epochs: 2, minibatches: 4}")],
        "two.yaml:6: pipelines.sort.algorithm.minibatches is 4; accepted: a divisor of prompts_per_step 6",
    ),
    "an adapter target that does not exist": (
        [("steps: 60", "adapter: {rank: 4, alpha: 8, targets: [q_proj, query]}")],
        "two.yaml:6: pipelines.sort.adapter.targets.1 is 'query'; accepted: one of q_proj, k_proj, v_proj, o_proj, ",
    ),
    "an adapter on a server that runs already": (
        [
            ("steps: 60", "adapter: {rank: 4, alpha: 8}"),
            ("slots: 32", 'engine: {name: vllm, url: "http://127.0.0.1:1"}'),
        ],
        "two.yaml:11: pipelines.sort.rollout.engine does not go with an adapter; accepted: our own engine, or vllm or ",
    ),
    "a server without its python": (
        [("slots: 32", "engine: vllm")],
        "two.yaml:11: pipelines.sort.rollout.engine.name is 'vllm'; accepted: vllm with python: PATH of its",
    ),
    "an engine that nobody knows": (
        [("slots: 32", "engine: nosuch")],
        "two.yaml:11: pipelines.sort.rollout.engine.name is 'nosuch': unknown; accepted: rlmux, vllm, sglang, ",
    ),
    "a server of another machine": (
        [("slots: 32", "engine: {name: vllm, url: 'http://example.com:80'}")],
        "two.yaml:11: pipelines.sort.rollout.engine.url is 'http://example.com:80'; accepted: http://127.0.0.1:PORT",
    ),
    "an adapter beside what a mixture of experts lacks": (
        [
            ("steps: 60", "adapter: {rank: 4, alpha: 8}"),
            (
                "    rollout:\n",
                "    model: {architecture: qwen3_moe, experts: 4, experts_per_token: 2, "
                "moe_intermediate_size: 8}\n    rollout:\n",
            ),
        ],
        "two.yaml:6: pipelines.sort.adapter.targets includes gate_proj, which a 'qwen3_moe' model lacks; accepted: [q_",
    ),
    "a checkpoint with sizes": (
        [("steps: 60", "model: {path: x, layers: 2}")],
        "two.yaml:6: pipelines.sort.model.layers is 2: does not go with 'path': the checkpoint's own",
    ),
    "a checkpoint that does not exist": (
        [("steps: 60", "model: {path: ckpt}")],
        "two.yaml:6: pipelines.sort.model.path is 'ckpt': no such folder (",
    ),
    "rows that do not exist": (
        [("task: reverse", "task: {name: file, path: rows.jsonl}")],
        "two.yaml:13: pipelines.reverse.task.path is 'rows.jsonl': no such file (",
    ),
    "rows of another kind": (
        [("task: reverse", "task: {name: file, path: rows.csv}")],
        "two.yaml:13: pipelines.reverse.task.path is 'rows.csv': not a file of rows by its name; accepted: .",
    ),
    "a file task without a file": (
        [("task: reverse", "task: file")],
        "two.yaml:13: pipelines.reverse.task is a mapping: 'path' is missing; accepted: a .jsonl or .parquet",
    ),
    "a path that no file task reads": (
        [("task: reverse", "task: {name: reverse, path: rows.jsonl}")],
        "two.yaml:13: pipelines.reverse.task.path is 'rows.jsonl': does not go with the task 'reverse'",
    ),
    "a reward that is no reference": (
        [("task: reverse", "task: {name: reverse, reward: my_rewards.score}")],
        "two.yaml:13: pipelines.reverse.task.reward is 'my_rewards.score'; accepted: module:function, such a",
    ),
    "a reward module that does not exist": (
        [("task: reverse", "task: {name: reverse, reward: 'my_rewards:score'}")],
        "two.yaml:13: pipelines.reverse.task.reward is 'my_rewards:score': no module 'my_rewards'; accepted:",
    ),
    "half of a colocated estimate": (
        [("steps: 60", "estimate: {rollout_s: 1, train_s: 1, colocated_train_s: 3}")],
        "two.yaml:6: pipelines.sort.estimate.colocated_train_s is 3; accepted: colocated_rollout_s and",
    ),
    "half of an estimate": (
        [("steps: 60", "estimate: {rollout_s: 1}")],
        "two.yaml:6: pipelines.sort.estimate.train_s is missing; accepted: a number, more than 0",
    ),
    "one beta": (
        [("steps: 60", "algorithm: {adam_betas: [0.9]}")],
        "two.yaml:6: pipelines.sort.algorithm.adam_betas is a list of 1; accepted: a list of 2 numbers",
    ),
    "a beta out of range": (
        [("steps: 60", "algorithm: {adam_betas: [0.9, 1.5]}")],
        "two.yaml:6: pipelines.sort.algorithm.adam_betas.1 is 1.5; accepted: a number, 0 or more, less than",
    ),
    "defaults that are no mapping": (
        [("defaults:\n  steps: 60", "defaults: [1]")],
        "two.yaml:5: defaults is a list of 1; accepted: a mapping",
    ),
    "a key given twice": (
        [("      slots: 32\n", "      slots: 32\n      slots: 16\n")],
        "two.yaml:12: key 'slots' is given twice; first at two.yaml:11",
    ),
    "a merge key": (
        [("    rollout:\n      slots: 32", "    <<: {seed: 1}")],
        "two.yaml:10: merge keys (<<) are not accepted; use 'defaults'",
    ),
    "no YAML": (
        [("  - name: sort", "  - name: [sort")],
        "two.yaml:9: this is not YAML: while parsing a flow sequence",
    ),
    "a tab": (
        [("      slots: 32", "\tslots: 32")],
        "two.yaml:11: this is not YAML: while scanning for the next token found character",
    ),
    "a tag": (
        [("steps: 60", "steps: !!python/name:os.system 60")],
        "two.yaml:6: tag 'python/name:os.system' is not accepted; write the plain value",
    ),
    "an alias of itself": (
        [("steps: 60", "task: &a {name: *a}")],
        "two.yaml:6: an alias (*) contains itself",
    ),
    "a second document": (
        [("pipelines:\n", "---\npipelines:\n")],
        "two.yaml:7: this is not YAML: expected a single document",
    ),
    "every pipeline wrong in one way": (
        [("      slots: 32\n", "      slot: 32\n"), ("    task: reverse\n", "    task: reverse\n    sed: 1\n")],
        "two.yaml:11: pipelines.sort.rollout.slot is 32: unknown key; nearest: slots",
    ),
    "no pipeline": (
        [("pipelines:\n", "pipelines: []\nx:\n")],
        "two.yaml:7: pipelines is an empty list; accepted: a list of mappings, at least 1",
    ),
    "three betas": (
        [("steps: 60", "algorithm: {adam_betas: [0.9, 0.9, 0.9]}")],
        "two.yaml:6: pipelines.sort.algorithm.adam_betas is a list of 3; accepted: a list of 2 numbers",
    ),
    "a character that is none": (
        [("task: reverse", 'task: {name: reverse, letters: "\\ud800"}')],
        "two.yaml:1: the file cannot be taken over: ",
    ),
    "a period that is none": (
        [("defaults:\n", "keep: {ended: 30 days}\ndefaults:\n")],
        "two.yaml:5: keep.ended is '30 days'; accepted: a whole number and h, d or w, such as 30d",
    ),
    "a bare period that is none": (
        [("defaults:\n", "keep: soon\ndefaults:\n")],
        "two.yaml:5: keep.ended is 'soon'; accepted: a whole number and h, d or w, such as 30d",
    ),
    "a number that is no period": (
        [("defaults:\n", "keep: 30\ndefaults:\n")],
        "two.yaml:5: keep is 30; accepted: a period such as 30d, or a mapping",
    ),
    "an unknown thing to keep": (
        [("defaults:\n", "keep: {logs: 30d}\ndefaults:\n")],
        "two.yaml:5: keep.logs is '30d': unknown key; accepted: ended, checkpoints, samples, project_gb",
    ),
    "no code folder": (
        [("defaults:\n", "code_folder: nowhere\ndefaults:\n")],
        "two.yaml:5: code_folder is 'nowhere'; accepted: a folder that exists",
    ),
}


@pytest.mark.parametrize("mistake", CASES)
def test_a_mistake_is_one_line_with_place_value_and_remedy(complaint, good, mistake):
    replace, expected = CASES[mistake]
    assert complaint(good, replace=replace).startswith(expected)


def test_the_first_mistake_of_the_file_is_reported(complaint, good):
    message = complaint(good, replace=[("slots: 32", "slots: 0"), ("steps: 60", "steps: 0")])
    assert message.startswith("two.yaml:6:")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "two.yaml:1: the file is empty; accepted: a mapping with cluster and pipelines"),
        ("# nothing\n", "two.yaml:1: the file is empty"),
        ("- a\n- b\n", "two.yaml:1: the file is a list of 2; accepted: a mapping with cluster and pipelines"),
        ("hello\n", "two.yaml:1: the file is 'hello'; accepted: a mapping with cluster and pipelines"),
        ("[" * 5000, "two.yaml: this is not YAML: nested too deeply"),
    ],
)
def test_a_file_of_another_shape_is_refused(complaint, text, expected):
    assert complaint(text).startswith(expected)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("pipelines.sort.steps=x", f"pipelines.sort.steps is 'x'; accepted: {WHOLE_NUMBER}"),
        (
            "pipelines.sort.stepz=4",
            "pipelines.sort.stepz is 4: unknown key; nearest: steps; accepted: name, seed,",
        ),
        (
            "pipelines.srt.steps=4",
            "nothing is called 'srt' there; nearest: sort; accepted: sort, reverse, 0 to 1, *",
        ),
        ("pipelines.7.steps=4", "nothing is called '7' there; accepted: sort, reverse, 0 to 1, *"),
        ("policy.x=4", "policy is 'rollmux' and has no keys"),
        ("nonsense", "accepted: key.key=value, such as pipelines.sort.steps=5"),
        ("a..b=1", "accepted: key.key=value, such as pipelines.sort.steps=5"),
        ("policy=[", "value:1: this is not YAML: while parsing a flow node"),
        ("policy=", "policy is empty; accepted: a text"),
        ("pipelines.sort.task=nope", "pipelines.sort.task"),
    ],
)
def test_a_wrong_override_names_itself_instead_of_a_line(complaint, good, override, expected):
    text = good + "policy: rollmux\n"
    message = complaint(text, override, check_training=refuse_unknown_task)
    assert message.startswith(f"--set {override}: {expected}")


def refuse_unknown_task(configs, code_folder):
    """As `rl.preflight` complains."""
    return [complaint_about(config.task) for config in configs]


def complaint_about(task):
    if task.name not in ("sort", "reverse"):
        return f"task.name: unknown task {task.name!r}; accepted: sort, reverse"
    if "digits" in task.params and not isinstance(task.params["digits"], int):
        return f"task.params.digits of task 'sort': {task.params['digits']!r}; accepted: a number"
    return None


def test_a_tasks_own_complaint_is_placed_at_its_key(complaint, good):
    message = complaint(good, replace=[("digits: 5", "digits: x")], check_training=refuse_unknown_task)
    assert message == "two.yaml:9: pipelines.sort.task.digits of task 'sort': 'x'; accepted: a number"
    message = complaint(good, replace=[("task: reverse", "task: nope")], check_training=refuse_unknown_task)
    assert message == "two.yaml:13: pipelines.reverse.task.name: unknown task 'nope'; accepted: sort, reverse"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rollout.slots: too many", "two.yaml:11: pipelines.sort.rollout.slots: too many"),
        ("model.path: no tokenizer", "two.yaml:8: pipelines.sort.model.path: no tokenizer"),
        ("/a/rows.jsonl row 3: too long", "two.yaml:9: pipelines.sort: /a/rows.jsonl row 3: too long"),
        ("prompt 3 of task 'sort': too long", "two.yaml:9: pipelines.sort: prompt 3 of task 'sort': too long"),
    ],
)
def test_a_complaint_about_training_is_placed_at_its_key_or_at_the_task(complaint, good, text, expected):
    assert complaint(good, check_training=lambda configs, code_folder: [text, None]) == expected


def test_an_unknown_policy_is_refused_where_policies_are_known(complaint, good):
    message = complaint(good + "policy: rolmux\n", policies=["rollmux", "solo"])
    assert message == "two.yaml:14: policy is 'rolmux': no such policy; nearest: rollmux; accepted: rollmux, solo"


def test_planning_needs_estimates_but_no_task(complaint, load, good):
    message = complaint(good, purpose=Purpose.PLAN)
    assert message.startswith("two.yaml:8: pipelines.sort.estimate is missing; accepted: {rollout_s: seconds,")
    estimates = "pipelines.*.estimate={rollout_s: 2, train_s: 1}"
    assert load(good, estimates, purpose=Purpose.PLAN).pipelines[0].pipeline.estimate.solo_s == 3


def test_planning_accepts_several_training_workers(load, good):
    sets = [
        "pipelines.*.estimate={rollout_s: 2, train_s: 1}",
        "cluster.pools.train.devices=4",
        "pipelines.sort.train.workers=4",
    ]
    assert load(good, *sets, purpose=Purpose.PLAN).pipelines[0].pipeline.num_train_nodes == 4


def test_a_reward_function_that_its_module_lacks_is_refused_with_the_nearest(complaint, good, tmp_path):
    (tmp_path / "my_rewards.py").write_text("import re\ndef score(x): return 0\ndef length(x): return 1\n")
    replace = [("task: reverse", "task: {name: reverse, reward: 'my_rewards:scor'}")]
    message = complaint(good, replace=replace)
    assert message.endswith("my_rewards.py has no 'scor'; nearest: score; accepted: score, length")
    (tmp_path / "my_rewards.py").write_text("def score(:\n")
    assert "my_rewards.py, line 1: not Python" in complaint(good, replace=replace)


def test_a_reward_function_may_be_asynchronous(load, good, tmp_path):
    (tmp_path / "my_rewards.py").write_text("async def co(solution_str): return 0.0\n")
    load(good.replace("task: reverse", "task: {name: reverse, reward: 'my_rewards:co'}"))


@pytest.mark.parametrize(("files", "lack"), [([], "has no config.json"), (["config.json"], "has no *.safetensors")])
def test_a_folder_that_is_no_checkpoint_is_refused(complaint, good, tmp_path, files, lack):
    (tmp_path / "ckpt").mkdir()
    for file in files:
        (tmp_path / "ckpt" / file).write_text("{}")
    assert lack in complaint(good, replace=[("steps: 60", "model: {path: ckpt}")])


def test_an_alias_bomb_is_refused_rather_than_expanded(complaint):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    assert "aliases expand to more than 200,000 values" in complaint("\n".join(lines))


def test_a_missing_file_is_refused_with_those_that_are_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("two.yaml").write_text("x: 1")
    with pytest.raises(SpecError, match=r"^tow\.yaml: no such file; accepted: a YAML file; there: two\.yaml$"):
        load_spec("tow.yaml")


def test_a_folder_or_binary_file_is_refused(tmp_path):
    with pytest.raises(SpecError, match="cannot be read: Is a directory"):
        load_spec(tmp_path)
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="not UTF-8 text"):
        load_spec(tmp_path / "x.yaml")
