"""Results for people: plain aligned text on stdout, or JSON with stable keys."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlmux.cli import memory_rows
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
        [
            {
                "project": row["project"],
                "used today, device-hours": f"{row['used_device_hours']:.4g}",
                "a day": "none" if row["budget_device_hours"] is None else f"{row['budget_device_hours']:g}",
            }
            for row in rows
        ]
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
            "steps": one["steps"],
            "reward": _reward(one),
            "tokens": one["tokens"],
            "s/step": one["step_s_mean"],
            "slowdown": one["step_slowdown"],
            "accepts": one["slo_slowdown"],
            "SLO": _SLO_WORDS[one["keeps_slo"]],
            "promise": one["promise"] or "",
            "status": f"{one['status']}, filler" if "score" in one else one["status"],
        }
        for name, one in summary["pipelines"].items()
    ]
    print_rows(pipelines)
    for name, one in summary["pipelines"].items():
        if one["slo_reason"]:
            print(f"{name}: {one['slo_reason']}")
        if words := slo_words(one):
            print(f"{name}: {words}")
        if words := move_words(len(one["moves"])):
            print(f"{name}: {words}")
        if "rounds" in one:
            print(f"{name}: {rounds_text(one['rounds'])}")
        if one.get("delivery"):
            print(f"{name}: {one['delivery']['says']}")
    print()
    devices = [
        {
            "device": name,
            "busy": _percent(one["utilization"]),
            "busy s": one["busy_s"],
            "switch s": one["switch_s"],
            "bubble s": one["bubble_s"],
            "idle s": one["idle_s"],
        }
        for name, one in summary["devices"].items()
    ]
    print_rows(devices)
    print(f"\ncontrol overhead {_percent(summary['control_overhead'], digits=2)}")
    for name, what in (("timeline.html", "timeline"), ("trace.json", "trace for ui.perfetto.dev")):
        if (folder / name).is_file():
            print(f"{what}: {folder / name}")


def rounds_text(rounds: Mapping[str, int]) -> str:
    """The rounds of a pipeline under tail batching, in words."""
    return (
        f"{rounds['short']} short and {rounds['long']} long rounds, {rounds['cut_trajectories']} trajectories cut, "
        f"{rounds['queued_prompts']} prompts wait for a long round"
    )


def _reward(one: Row) -> str:
    """Reward of the first and the last step, or, where there is a score, the mean of all."""
    if "score" in one:
        return f"mean {_text(one['score'])}"
    return f"{_text(one['reward_first'])} → {_text(one['reward_last'])}"


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
    show_by_policy(table["policies"], as_json=False)
    first = next(iter(table["policies"]))
    print(f"\nspeedup and tokens_ratio: against {first}\nruns: {table['folder']}")
    _show_ablations(table)


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
    rows = []
    has_unheld = any(figures["paid_usd"] > figures["cost_usd"] for figures in result["policies"].values())
    for policy, figures in result["policies"].items():
        rows.append(
            {
                "policy": policy,
                **({"paid $": figures["paid_usd"]} if has_unheld else {}),
                "$": figures["cost_usd"],
                "bound $": figures["bound_usd"],
                "$/solo h": figures["paid_usd_per_solo_hour"],
                "$/h": figures["cost_usd_per_hour"],
                "SLOs kept": _percent(figures["slo_attainment"], digits=1),
                "slowdown mean": figures["mean_step_slowdown"],
                "max": figures["max_step_slowdown"],
                "queued s": figures["mean_queue_s"],
                "wait s": figures["mean_wait_s"],
                "hours": figures["makespan_s"] / 3600,
                "peak GPUs": _pair(figures["peak_gpus"], _text),
                "busy": _pair(figures["utilization"], _percent),
                "direct/scaled/new": _pair(figures["admissions"], _text),
                "refused": figures["num_refused"],
            }
        )
    print_rows(rows)
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
            {
                "policy": policy,
                "finished": f"{figures['fillers']['num_finished']:g} of {figures['fillers']['num']:g}",
                "steps": figures["fillers"]["steps"],
                "device-hours": figures["fillers"]["device_hours"],
                "$": figures["fillers"]["usd"],
            }
            for policy, figures in result["policies"].items()
        ]
    )


def _show_spot(result: Row) -> None:
    """What came of nodes with a price over time and of those that were taken back, where there were any."""
    spots = {policy: figures["spot"] for policy, figures in result["policies"].items()}
    if not any(one["num_notices"] or one["usd"] or one["list_usd"] for one in spots.values()):
        return
    print("\nspot nodes:")
    print_rows(
        [
            {
                "policy": policy,
                "spot $": one["usd"],
                "at list price": one["list_usd"],
                "notices": one["num_notices"],
                "moved in time": one["num_moved"],
                "caught": one["num_caught"],
                "lost s": one["lost_s"],
            }
            for policy, one in spots.items()
        ]
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
    print_rows(
        [
            {
                "policy": policy,
                "mechanisms": mechanisms.replace(",", ", "),
                "figure": _ABLATION_FIGURES[worth["figure"]],
                "with": worth["with"],
                "without": worth["without"],
                "without/with": _percent(worth["ratio"], digits=1),
            }
            for policy, ablations in result["ablations"].items()
            for mechanisms, worth in ablations.items()
        ]
    )


def _show_notes(result: Row) -> None:
    """What the figures rest on that was not given."""
    for note in result.get("notes", ()):
        print(f"note: {note}")


def _show_predictions(result: Row) -> None:
    """A run that was made, and what it would have taken."""
    measured = result["measured"]
    first = {"policy": f"{measured['policy']}, measured", "seconds": measured["makespan_s"], "of measured": 1.0}
    rows = [
        {
            "policy": policy,
            "seconds": figures["makespan_s"],
            "of measured": figures["makespan_s"] / measured["makespan_s"],
            "slowdown mean": figures["mean_step_slowdown"],
            "max": figures["max_step_slowdown"],
            "busy": _pair(figures["utilization"], _percent),
        }
        for policy, figures in result["policies"].items()
    ]
    print_rows([{**dict.fromkeys(rows[0]), **first}, *rows])
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
        [
            {
                "pipeline": one["pipeline"],
                "status": one["status"],
                "group": one["group"],
                "admission": one["admission"],
                "rollout nodes": " ".join(one["rollout_nodes"]),
                "train nodes": " ".join(one["train_nodes"]),
                "s/step": one["step_s"],
                "slowdown": one["step_slowdown"],
                "accepts": one["slo_slowdown"],
                "$/h": one["usd_per_hour"],
                "bound $/h": one["bound_usd_per_hour"],
                "": one["reason"],
            }
            for one in plan["pipelines"]
        ]
    )
    for one in plan["pipelines"]:
        if words := slo_words(one):
            print(f"{one['pipeline']}: {words}")
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
    if plan["memory"]:
        print("\nmemory of one worker at its fullest moment, estimated:")
        print_rows(memory_rows.rows_of(plan["memory"]))
    _show_notes(plan)
    for picture in plan.get("pictures", ()):
        print(picture)


def _show_paid_for(plan: Row) -> None:
    """The parts of a plan's dollars per hour as a waterfall, from the bound to all that is paid."""
    from rlmux.sim.results.plan_costs import PAID_FOR

    parts = {PAID_FOR[part]: usd for part, usd in plan["paid_for"].items() if usd}
    print("\nwhat is paid for, in $/h:")
    _print_waterfall("$/h", parts, plan["paid_usd_per_hour"])
    print(f"bound ${plan['bound_usd_per_hour']:,.2f}/h, ${_text(plan['usd_per_solo_hour'])}/solo h")


def show_step_causes(name: str, steps: Row) -> None:
    """Where the seconds of a pipeline's mean step went, from a step alone to what it took, as a waterfall."""
    times = "" if steps["slowdown"] is None else f", {steps['slowdown']:.2f} times as long as alone"
    print(f"a step of {name} took {steps['step_s']:.3g} s{times} (mean of {steps['num_steps']} steps):")
    parts = {"alone": steps["alone_s"], **{one["label"]: one["seconds"] for one in steps["causes"]}}
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
                "pipeline": one["pipeline"],
                "phases": "overlap" if one["overlaps"] else "one after the other",
                "rollout nodes": one["rollout_nodes"],
                "train nodes": one["train_nodes"],
                "rollout s": one["rollout_s"],
                "train s": one["train_s"],
                "s/step": one["step_s"],
                "asked for": f"{one['asked']['rollout_nodes']} + {one['asked']['train_nodes']}",
                "s/step there": one["asked"]["step_s"],
                "gain": one["gain"],
            }
            for one in splits
        ]
    )
    for one in splits:
        if one["wants_another_rollout_node"]:
            print(f"{one['pipeline']}: rollouts are behind training by what one more rollout node saves, or more")


def exit_code_of_plan(plan: Row) -> int:
    """1 if a pipeline is refused, else 0: one that queues for nodes is served later."""
    return int(any(one["status"] == "refused" for one in plan["pipelines"]))


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
        columns = ("section", "figure", "published", "replay", "ours", "min", "max", "deviation")
        shown.append({**{key: row[key] for key in columns}, "accepted": f"{low:.4g}-{high:.4g}", "missed": note})
    print_rows(shown)
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
    """One value, keys in their given order; what is not finite is null, since JSON has no word for it."""
    print(json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False))


def print_rows(rows: Sequence[Row]) -> None:
    """Rows with equal keys as aligned columns; numbers to the right. Nothing is wrapped or cut off, so that scripts can
    read it."""
    from rich.console import Console

    for line in Console(width=_WIDE).render_lines(table_of(rows), pad=False) if rows else ():
        print("".join(segment.text for segment in line).rstrip())


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


def _pair(by_pool: Row, shown: Callable[[Any], str]) -> str:
    """The values of a small mapping, in its order, with slashes."""
    return "/".join(shown(value) for value in by_pool.values())


def _percent(share: float | None, digits: int = 0) -> str:
    return "-" if share is None else f"{share:.{digits}%}"
