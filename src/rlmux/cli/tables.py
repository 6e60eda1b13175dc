"""Results for people: plain aligned text on stdout, or JSON with stable keys."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlmux.cli import memory_rows
from rlmux.report.mechanisms import mechanism_words
from rlmux.report.slos import move_words, slo_words

if TYPE_CHECKING:
    from rich.table import Table

Row = Mapping[str, Any]
_WIDE = 100_000
"""Characters of a line that is not wrapped."""
_BAR_WIDTH = 40
"""Characters of a waterfall's whole."""
_FAILED_STATUSES = ("failed", "refused")
_ABLATION_FIGURES = {"cost_usd_per_solo_hour": "$/solo h", "makespan_s": "makespan s"}
_SLO_WORDS = {True: "kept", False: "missed", None: ""}


def exit_code(summary: Row) -> int:
    """1 if a pipeline failed or was refused, else 0."""
    return int(any(pipeline["status"] in _FAILED_STATUSES for pipeline in summary["pipelines"].values()))


def show_budgets(hours_by_project: Mapping[str, tuple[float, float]], *, as_json: bool) -> None:
    """Device-hours that each project has used today, and may use; infinity in the table is `none`, in JSON null."""
    rows = [
        {"project": name, "used_device_hours": used, "budget_device_hours": None if math.isinf(most) else most}
        for name, (used, most) in hours_by_project.items()
    ]
    if as_json:
        print_json({"projects": rows})
        return
    print_rows(
        [{**row, "day": f"{row['budget_device_hours'] or math.inf:g}".replace("inf", "none")} for row in rows],
        "project | used today, device-hours: used_device_hours .4g | a day: day",
    )


def show_run(summary: Row, folder: Path, *, as_json: bool) -> None:
    """How far each pipeline got, how busy the devices were, and where the rest is."""
    if as_json:
        print_json(summary)
        return
    seconds, speed = _text(summary["makespan_s"]), _text(summary["tokens_per_s"])
    print(f"policy {summary['policy']}: {seconds} s, {speed} tokens/s\n")
    pipelines = [
        {
            "pipeline": name,
            **pipeline,
            "reward": _reward(pipeline),
            "keeps_slo": _SLO_WORDS[pipeline["keeps_slo"]],
            "promise": pipeline["promise"] or "",
            "status": f"{pipeline['status']}, filler" if "score" in pipeline else pipeline["status"],
        }
        for name, pipeline in summary["pipelines"].items()
    ]
    print_rows(
        pipelines,
        "pipeline | steps | reward | tokens | s/step: step_s_mean | slowdown: step_slowdown | accepts: slo_slowdown | "
        "SLO: keeps_slo | promise | status",
    )
    for name, pipeline in summary["pipelines"].items():
        if pipeline["slo_reason"]:
            print(f"{name}: {pipeline['slo_reason']}")
        if words := slo_words(pipeline):
            print(f"{name}: {words}")
        if words := move_words(len(pipeline["moves"])):
            print(f"{name}: {words}")
        if "rounds" in pipeline:
            print(f"{name}: {rounds_text(pipeline['rounds'])}")
        if pipeline.get("delivery"):
            print(f"{name}: {pipeline['delivery']['says']}")
    print()
    print_rows(
        [{"device": name, **device} for name, device in summary["devices"].items()],
        "device | busy: utilization .0% | busy s: busy_s | switch s: switch_s | bubble s: bubble_s | idle s: idle_s",
    )
    _show_planned(summary.get("planned", ()))
    print(f"\ncontrol overhead {_percent(summary['control_overhead'], digits=2)}")
    if words := mechanism_words(summary["mechanisms"]):
        print(f"mechanisms: {words}")
    for name, what in (("timeline.html", "timeline"), ("trace.json", "trace for ui.perfetto.dev")):
        if (folder / name).is_file():
            print(f"{what}: {folder / name}")


def _show_planned(rows: Sequence[Row]) -> None:
    """How far off a plan was: seconds of a step's phases alone, as planned and as measured."""
    if not rows:
        return
    print("\nseconds of a step alone, as `plan` has them and as measured:")
    shown = [{**row, "range": _between(row["low_s"], row["high_s"])} for row in rows]
    columns = "pipeline | figure | planned: planned_s | range | from: origin | measured: measured_s | off: error +.0%"
    print_rows(shown, columns)


def rounds_text(rounds: Mapping[str, int]) -> str:
    """The rounds of a pipeline under tail batching, in words."""
    return (
        f"{rounds['short']} short and {rounds['long']} long rounds, {rounds['cut_trajectories']} trajectories cut, "
        f"{rounds['queued_prompts']} prompts wait for a long round"
    )


def _reward(pipeline: Row) -> str:
    """Reward of the first and the last step, or, where there is a score, the mean of all."""
    if "score" in pipeline:
        return f"mean {_text(pipeline['score'])}"
    return f"{_text(pipeline['reward_first'])} → {_text(pipeline['reward_last'])}"


def show_by_policy(figures: Mapping[str, Row], *, as_json: bool) -> None:
    """One row for each policy, one column for each figure."""
    if as_json:
        print_json(figures)
        return
    print_rows([{"policy": policy, **flat(row)} for policy, row in figures.items()])


def show_comparison(table: Row, *, as_json: bool) -> None:
    """One row for each policy that was trained under, and where the runs are."""
    if as_json:
        print_json({**table["policies"], **{key: table[key] for key in ("ablations",) if key in table}})
        return
    apart = ("makespans_s", "mechanisms")
    rows = {name: {key: row[key] for key in row if key not in apart} for name, row in table["policies"].items()}
    show_by_policy(rows, as_json=False)
    first, num_rounds = next(iter(rows)), len(table["policies"][next(iter(rows))]["makespans_s"])
    of_rounds = f"; medians of {num_rounds} rounds" if num_rounds > 1 else ""
    print(f"\nspeedup and tokens_ratio: against {first}{of_rounds}\nruns: {table['folder']}")
    _show_mechanisms(table["policies"])
    _show_ablations(table)


def _show_mechanisms(policies: Mapping[str, Row]) -> None:
    """What moved, was given away or shared under each policy, in the mean of the rounds; nothing where nothing did."""
    used = {name: row["mechanisms"] for name, row in policies.items()}
    if not any(flat(row)[key] for row in used.values() for key in flat(row)):
        return
    print("\nwhat the mechanisms did:")
    print_rows(
        [{"policy": name, "kv_mb": row["tails"]["kv_bytes"] / 1e6, **row} for name, row in used.items()],
        "policy | tails: tails.migrations | trajectories: tails.trajectories | tokens: tails.tokens | KV MB: kv_mb | "
        "move s: tails.seconds | freed s: tails.freed_s | whole shards: shards.migrations | "
        "tool waits: tool_waits.given_away | given s: tool_waits.freed_s | shared: fractions.orders",
    )
    print(
        "tails: migrations of begun trajectories; freed s: device-seconds until the rollout ended; given s: until the "
        "shard went on;\nwhole shards: migrated before they began; shared: orders on a fraction of their device"
    )


def show_simulation(result: Row, *, as_json: bool) -> None:
    """One row for each policy; means over the seeds."""
    if as_json:
        print_json(result)
        return
    seeds = f"{result['num_seeds']} seed" + ("s" if result["num_seeds"] > 1 else "")
    if result["seeds"][0]:
        seeds += f" ({result['seeds'][0]} to {result['seeds'][-1]})"
    print(f"{result['workload']}, {seeds}. {result['about']}".rstrip() + "\n")
    if "measured" in result:
        _show_predictions(result)
        return
    has_unheld = any(figures["paid_usd"] > figures["cost_usd"] for figures in result["policies"].values())
    print_rows(
        [{**row, "hours": row["makespan_s"] / 3600} for row in _by_policy(result)],
        f"policy | {'paid $: paid_usd | ' if has_unheld else ''}$: cost_usd | bound $: bound_usd | "
        "$/solo h: paid_usd_per_solo_hour | $/h: cost_usd_per_hour | SLOs kept: slo_attainment .1% | "
        "slowdown mean: mean_step_slowdown | max: max_step_slowdown | queued s: mean_queue_s | wait s: mean_wait_s | "
        "hours | peak GPUs: peak_gpus | busy: utilization .0% | direct/scaled/new: admissions | refused: num_refused",
    )
    print(
        "\nbound $: the steps that were made, on nodes that are never idle; $/solo h: for an hour of solo work;"
        "\nSLOs kept: of all submitted, counted from submission; wait s: mean to the first work, queued s of them"
        + ("\npaid $: counted nodes whether held or not, $: while pipelines held them" if has_unheld else "")
    )
    if any(len(figures["peak_gpus"]) > 1 for figures in result["policies"].values()):
        print("peak GPUs and busy: rollout/train")
    _show_moves(result)
    _show_fillers(result)
    _show_spot(result)
    _show_parts(result)
    _show_ablations(result)
    _show_notes(result)
    for picture in result.get("pictures", ()):
        print(picture)


def _by_policy(result: Row) -> list[Row]:
    """The figures of each policy, with its name."""
    return [{"policy": policy, **figures} for policy, figures in result["policies"].items()]


def _show_moves(result: Row) -> None:
    """The relocations under each policy, and what they saved where that was simulated."""
    for policy, figures in result["policies"].items():
        words = move_words(figures["num_moves"])
        if words and figures["moves_saved_usd"] is not None:
            words += f", saved {_saved_usd(figures, result['num_seeds'])}"
        if words:
            print(f"{policy}: {words}")


def _saved_usd(figures: Row, num_seeds: int) -> str:
    saved, paid = figures["moves_saved_usd"], figures["paid_usd"]
    words = f"{_usd(saved)}: {_usd(paid)} paid, {_usd(paid + saved)} without them"
    if num_seeds > 1:
        words += f"; by seed {_usd(figures['min']['moves_saved_usd'])} to {_usd(figures['max']['moves_saved_usd'])}"
    return words


def _usd(dollars: float) -> str:
    return f"{'-' if dollars <= -0.005 else ''}${abs(dollars):,.2f}"


def _show_fillers(result: Row) -> None:
    """What fillers did under each policy, where there are any."""
    if not any(figures["fillers"]["num"] for figures in result["policies"].values()):
        return
    print("\nfillers, which no other figure counts:")
    print_rows(
        [
            {**row, "finished": f"{row['fillers']['num_finished']:g} of {row['fillers']['num']:g}"}
            for row in _by_policy(result)
        ],
        "policy | finished | steps: fillers.steps | device-hours: fillers.device_hours | $: fillers.usd",
    )


def _show_spot(result: Row) -> None:
    """Costs and losses of spot nodes, if there were any."""
    spots = [figures["spot"] for figures in result["policies"].values()]
    if not any(spot["num_notices"] or spot["usd"] or spot["list_usd"] for spot in spots):
        return
    print("\nspot nodes:")
    print_rows(
        _by_policy(result),
        "policy | spot $: spot.usd | at list price: spot.list_usd | notices: spot.num_notices | "
        "moved in time: spot.num_moved | caught: spot.num_caught | lost s: spot.lost_s",
    )


def _show_parts(result: Row) -> None:
    """What the dollars of each policy were paid for, where anything was."""
    from rlmux.sim.results.pictures import PARTS

    paid = {policy: figures for policy, figures in result["policies"].items() if figures["cost_usd"]}
    has_unheld = any(figures["paid_usd"] > figures["cost_usd"] for figures in paid.values())
    if paid:
        print("\nwhat is paid for, in $:")
        print_rows(
            [
                {"policy": policy}
                | {words: figures["parts_usd"][part] for part, words in PARTS.items()}
                | ({"nodes without a pipeline": figures["paid_usd"] - figures["cost_usd"]} if has_unheld else {})
                | {"all": figures["paid_usd"]}
                for policy, figures in paid.items()
            ]
        )


def _show_ablations(result: Row) -> None:
    """What each mechanism is worth, where policies ran with and without it."""
    if "ablations" not in result:
        return
    print("\nwhat mechanisms are worth (above 100%: they help):")
    rows = [
        {
            **worth,
            "policy": policy,
            "mechanisms": names.replace(",", ", "),
            "figure": _ABLATION_FIGURES[worth["figure"]],
            "rounds": " to ".join(f"{ratio:.1%}" for ratio in (worth["ratios"][0], worth["ratios"][-1]))
            if "ratios" in worth
            else None,
        }
        for policy, ablations in result["ablations"].items()
        for names, worth in ablations.items()
    ]
    by_round = " | by round: rounds" if any(row["rounds"] for row in rows) else ""
    print_rows(rows, f"policy | mechanisms | figure | with | without | without/with: ratio .1%{by_round}")


def _show_notes(result: Row) -> None:
    """What the figures rest on that was not given."""
    for note in result.get("notes", ()):
        print(f"note: {note}")


def _show_predictions(result: Row) -> None:
    """A finished run and its predictions under other policies."""
    measured = result["measured"]
    seconds = measured["makespan_s"]
    figures = ("mean_step_slowdown", "max_step_slowdown", "utilization")
    first = {"policy": f"{measured['policy']}, measured", "makespan_s": seconds, **dict.fromkeys(figures)}
    print_rows(
        [{**row, "of_measured": row["makespan_s"] / seconds} for row in (first, *_by_policy(result))],
        "policy | seconds: makespan_s | of measured: of_measured | slowdown mean: mean_step_slowdown | "
        "max: max_step_slowdown | busy: utilization .0%",
    )
    if any(figures["moves_saved_usd"] is not None for figures in result["policies"].values()):
        _show_moves(result)
    _show_ablations(result)
    for picture in result.get("pictures", ()):
        print(picture)


def show_plan(plan: Row, *, as_json: bool) -> None:
    """One row for each pipeline, then what it all costs."""
    if as_json:
        print_json(plan)
        return
    print_rows(
        plan["pipelines"],
        "pipeline | status | group | admission | rollout nodes: rollout_nodes | train nodes: train_nodes | "
        "s/step: step_s | slowdown: step_slowdown | accepts: slo_slowdown | $/h: usd_per_hour | "
        "bound $/h: bound_usd_per_hour | : reason",
    )
    for pipeline in plan["pipelines"]:
        if words := slo_words(pipeline):
            print(f"{pipeline['pipeline']}: {words}")
    gpus = ", ".join(f"{number} in {pool}" for pool, number in plan["gpus"].items())
    print(
        f"\npolicy {plan['policy']}: ${plan['usd_per_hour']:,.2f}/h, GPUs: {gpus}; "
        f"${plan['solo_usd_per_hour']:,.2f}/h if each pipeline had nodes of its own"
    )
    if plan["paid_usd_per_hour"]:
        _show_paid_for(plan)
    for base in plan["bases"]:
        print(f"base {base['base']}: {base['gb']:.3f} GB of host memory, once for {', '.join(base['pipelines'])}")
    if "splits" in plan:
        _show_splits(plan["splits"])
    _show_figures(plan["figures"])
    if plan["memory"]:
        print("\nmemory of one worker at its fullest moment, estimated:")
        print_rows(memory_rows.rows_of(plan["memory"]))
    _show_notes(plan)
    for picture in plan.get("pictures", ()):
        print(picture)


def _show_figures(figures: Mapping[str, Sequence[Row]]) -> None:
    """Seconds of a step's parts with their ranges and origins; pipelines with the same ones have them once."""
    named: dict[str, list[str]] = {}
    for name, own in figures.items():
        named.setdefault(json.dumps(own), []).append(name)
    rows = []
    for text, names in named.items():
        for index, figure in enumerate(json.loads(text)):
            rows.append(
                {
                    "pipeline": ", ".join(names) if not index else "", "figure": figure["name"],
                    "seconds": figure["seconds"], "range": _between(figure["low"], figure["high"]),
                    "from": figure["origin"], "": figure["basis"],
                }
            )  # fmt: skip
    if rows:
        print("\nseconds of a step alone, and of what comes beside it:")
        print_rows(rows)


def _between(low: float, high: float) -> str:
    """A range in words; empty where none is known."""
    return "" if low == high else f"{low:.3g} to {high:.3g}"


def _show_paid_for(plan: Row) -> None:
    """The parts of a plan's dollars per hour as a waterfall, from the bound to all that is paid."""
    from rlmux.sim.results.plan_costs import PAID_FOR

    parts = {PAID_FOR[part]: usd for part, usd in plan["paid_for"].items() if usd}
    print("\nwhat is paid for, in $/h:")
    _print_waterfall("$/h", parts, plan["paid_usd_per_hour"])
    print(f"bound ${plan['bound_usd_per_hour']:,.2f}/h, ${_text(plan['usd_per_solo_hour'])}/solo h")


def show_step_causes(name: str, steps: Row) -> None:
    """Waterfall from a pipeline's solo step to its measured mean step, by cause."""
    times = "" if steps["slowdown"] is None else f", {steps['slowdown']:.2f} times as long as alone"
    print(f"a step of {name} took {steps['step_s']:.3g} s{times} (mean of {steps['num_steps']} steps):")
    parts = {"alone": steps["alone_s"], **{cause["label"]: cause["seconds"] for cause in steps["causes"]}}
    _print_waterfall("s", parts, steps["step_s"])


def _print_waterfall(unit: str, parts: Mapping[str, float], whole: float) -> None:
    """Parts below each other, each beginning where the one above ends, and their sum."""
    begins = [0.0, *accumulate(parts.values())]
    begins[-1] = 0.0  # the row of the sum
    print_rows(
        [
            {"": words, unit: part, "of all": _percent(part / whole), " ": _bar(begin / whole, part / whole)}
            for (words, part), begin in zip([*parts.items(), ("all", whole)], begins, strict=True)
        ]
    )


def _bar(begin: float, share: float) -> str:
    """A bar of a waterfall, as parts of its whole width; a thin one where it is narrower than a character."""
    first, last = round(begin * _BAR_WIDTH), round((begin + share) * _BAR_WIDTH)
    return " " * first + ("█" * (last - first) or "▏")


def _show_splits(splits: Sequence[Row]) -> None:
    """The best split of each pipeline, beside its requested nodes."""
    print("\nbest split of the nodes for each pipeline by itself, without switches and sync:")
    print_rows(
        [
            {
                **split,
                "phases": "overlap" if split["overlaps"] else "one after the other",
                "asked for": f"{split['asked']['rollout_nodes']} + {split['asked']['train_nodes']}",
            }
            for split in splits
        ],
        "pipeline | phases | rollout nodes: rollout_nodes | train nodes: train_nodes | rollout s: rollout_s | "
        "train s: train_s | s/step: step_s | asked for | s/step there: asked.step_s | gain",
    )
    for split in splits:
        if split["wants_another_rollout_node"]:
            print(f"{split['pipeline']}: rollouts are behind training by what one more rollout node saves, or more")


def exit_code_of_plan(plan: Row) -> int:
    """1 if a pipeline is refused, else 0: one that queues for nodes is served later."""
    return int(any(pipeline["status"] == "refused" for pipeline in plan["pipelines"]))


def show_reproduction(result: Row, *, as_json: bool) -> None:
    """Published, replay, ours; below them the causes of what is missed, and what the reproduction chose."""
    if as_json:
        print_json(result)
        return
    causes: dict[str, int] = {}
    shown = []
    for row in result["rows"]:
        note = ""
        if not row["reached"]:
            without = row["ours_without_cause"]
            cause = row["cause"] if without is None else f"{row['cause']}; without that, ours is {without:.4g}"
            note = str(causes.setdefault(f"{row['cause_is']}: {cause}", len(causes) + 1))
        low, high = row["accepted"]
        shown.append({**row, "accepted": f"{low:.4g}-{high:.4g}", "missed": note})
    print_rows(shown, "section | figure | published | replay | ours | min | max | deviation | accepted | missed")
    if causes:
        print("\nmissed (outside the accepted range):")
    for cause, number in causes.items():
        print(f"  {number}  {cause}")
    for key, title in (
        ("our_accounting", "by our accounting: the production trace, the same steps under every policy, all costs"),
        ("bounds", "least and steady $/h of the production trace, by the paper's accounting"),
        ("choices", "chosen where the paper leaves it open"),
        ("left_out", "left out"),
    ):
        if result.get(key):
            print(f"\n{title}:")
            print_rows(result[key])


def print_json(value: Any) -> None:
    """One value, keys in their given order; non-finite numbers become null."""
    print(json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False))


def print_rows(rows: Sequence[Row], columns: str = "") -> None:
    """Rows with equal keys as aligned columns; numbers to the right. Nothing is wrapped or cut off, so that scripts can
    read it.

    `columns`: which to print and in what order, by default all: `title: key format`, with bars between. The key is the
    title where there is no other; a key with dots leads into nested values.
    """
    from rich.console import Console

    shown = [_picked(row, columns) for row in rows] if columns else rows
    for line in Console(width=_WIDE).render_lines(table_of(shown), pad=False) if shown else ():
        print("".join(segment.text for segment in line).rstrip())


def _picked(row: Row, columns: str) -> Row:
    cells: dict[str, Any] = {}
    for column in columns.split("|"):
        title, colon, key = map(str.strip, column.partition(":"))
        path, _, how = key.partition(" ") if colon else (title, "", "")
        cells[title] = _cell(reduce(_value_at, path.split("."), row), how)
    return cells


def _value_at(value: Any, name: str) -> Any:
    return value[name] if isinstance(value, Mapping) else getattr(value, name)


def _cell(value: Any, how: str) -> Any:
    """The value in its format; those of pools with slashes between, those of a list with spaces."""
    match value:
        case Mapping():
            return "/".join(_text(_cell(child, how)) for child in value.values())
        case list() | tuple():
            return " ".join(value)
        case None:
            return "-" if how else None
    return format(value, how) if how else value


def table_of(rows: Sequence[Row]) -> Table:
    """One row or more with equal keys, as a part of a display."""
    from rich.table import Table
    from rich.text import Text  # cells are plain text: square brackets are no markup

    table = Table(box=None, pad_edge=False)
    for name in rows[0]:
        is_number = all(isinstance(row[name], int | float | None) for row in rows)
        table.add_column(Text(name), justify="right" if is_number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(_text(row[name])) for name in rows[0]))
    return table


def flat(row: Row, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys: one cell for each number."""
    flattened: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            flattened.update(flat(value, f"{prefix}{key}."))
        else:
            flattened[prefix + str(key)] = value
    return flattened


def _text(value: Any) -> str:
    """Four digits that matter; whole numbers with thousands."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float() if not math.isfinite(value):
            return "any" if value > 0 else "-"
        case float() if abs(value) >= 1000:
            return f"{value:,.0f}"
        case float():
            return f"{value:.4g}"
    return str(value)


def _finite(value: Any) -> Any:
    match value:
        case Mapping():
            return {str(key): _finite(child) for key, child in value.items()}
        case list() | tuple():
            return [_finite(child) for child in value]
        case float() if not math.isfinite(value):
            return None
    return value


def _percent(share: float | None, digits: int = 0) -> str:
    return "-" if share is None else f"{share:.{digits}%}"
