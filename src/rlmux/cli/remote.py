"""Commands on a running run, in a folder or on a server, and their displays.

submit, cancel, retry, remove, hold, release, rank, park, unpark, usage, why, status, logs   a RunTarget answers all
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rlmux.cli import inputs, tables
from rlmux.client import in_folder
from rlmux.client.target import RunTarget, is_url, target_of
from rlmux.core.errors import UserError
from rlmux.report.slos import slo_words
from rlmux.report.timeline.records import is_removed, removed_text, size_words, tries_text

if TYPE_CHECKING:
    from rich.table import Table

_REDRAW_S = 1.0
_FOLLOW_S = 0.3
_OVER = ("finished", "failed", "cancelled", "refused")
_AWAY_S = 600.0
"""Seconds for which a server, or a controller that it starts again, may be away from those who follow a run."""


def submit(file: str, place: str, sets: Sequence[str] | None, *, as_json: bool) -> int:
    """Check the file against the run's cluster here, then hand it over. Prints what became of each pipeline, and the
    address of their page; returns the exit code."""
    with closing(target_of(place, inputs.print_notice)) as target:
        pipelines = target.submit(inputs.load(file, sets, cluster_of=target.spec()), file)
        page = target.page([each["pipeline"] for each in pipelines])
    code = show_submission(pipelines, as_json=as_json)
    if page is not None and not as_json:
        inputs.print_notice(f"page: {page}")
    return code


def send_command(place: str, request: str, name: str, **fields: Any) -> str:
    """Send a command for one pipeline; returns the outcome in words."""
    with closing(target_of(place)) as target:
        return str(target.send_command(request, name, **fields)["outcome"])


def retry(place: str, names: Sequence[str], *, as_json: bool) -> int:
    """Retry failed pipelines; prints a line for each, and returns the exit code: 2 where one is refused."""
    rows = _outcomes(place, names, "retry", as_json=as_json)
    for row in () if as_json else rows:
        if "reason" not in row:
            print(f"{row['pipeline']}: {row['outcome']}")
    return 2 if any("reason" in row for row in rows) else 0


def _outcomes(place: str, names: Sequence[str], request: str, *, as_json: bool, **fields: Any) -> list[dict[str, Any]]:
    """Send a command for each pipeline. Prints all outcomes as JSON, or the reasons of refusals."""
    rows: list[dict[str, Any]] = []
    with closing(target_of(place)) as target:
        for name in dict.fromkeys(names):
            try:
                rows.append({"pipeline": name, **target.send_command(request, name, **fields)})
            except UserError as error:
                rows.append({"pipeline": name, "outcome": "refused", "reason": str(error)})
    if as_json:
        tables.print_json({"pipelines": rows})
    for row in () if as_json else rows:
        if "reason" in row:
            inputs.print_notice(row["reason"])
    return rows


def remove(place: str, names: Sequence[str], parts: str, *, is_dry: bool, as_json: bool) -> int:
    """Remove files of ended pipelines; prints a line for each, and returns the exit code: 2 where one is refused."""
    rows = _outcomes(place, names, "remove", as_json=as_json, parts=parts, dry_run=is_dry)
    for row in () if as_json else rows:
        if "reason" not in row:
            what = "" if parts == "all" else f"{parts} "
            print(f"{row['pipeline']}: {what}{row['outcome']} ({size_words(row['freed_bytes'])})")
    freed = [row["freed_bytes"] for row in rows if "freed_bytes" in row]
    if len(freed) > 1 and not as_json:
        print(f"{size_words(sum(freed))} in all")
    return 2 if any("reason" in row for row in rows) else 0


def remove_whole(place: str, lane: str | None, *, is_sure: bool, is_dry: bool, as_json: bool) -> None:
    """Remove a run's folder, or a lane of a server, once the user says so."""
    remove_it = _remover(place, lane)
    what = place if lane is None else f"{place}: lane {lane}"
    num_bytes = remove_it(is_dry=True)
    if not is_dry:
        if not is_sure and not sys.stdin.isatty():
            raise UserError(f"{what}: {size_words(num_bytes)} would be removed, its log too; accepted: with --yes")
        if not is_sure:
            typer.confirm(f"Remove {what} ({size_words(num_bytes)}), its log too?", abort=True)
        num_bytes = remove_it(is_dry=False)
    outcome = "would be removed" if is_dry else "removed"
    if as_json:
        tables.print_json({"folder": place, "lane": lane, "outcome": outcome, "freed_bytes": num_bytes})
    else:
        print(f"{what}: {outcome} ({size_words(num_bytes)})")


def _remover(place: str, lane: str | None) -> Callable[..., int]:
    """Removes the run's folder, or the server's lane, unless `is_dry`; returns its bytes."""
    if lane is None and not is_url(place):
        return partial(in_folder.remove, Path(place))
    if lane is None or not is_url(place):
        raise UserError(
            f"{place}: accepted: names of pipelines, the folder of a run, or a server's URL with --lane NAME"
        )
    from rlmux.client.on_server import OnServer

    return partial(OnServer(place, inputs.print_notice).remove_lane, lane)


def stop(place: str, *, as_json: bool) -> None:
    """Stop a folder's process on this machine and print the command that resumes it."""
    if is_url(place):
        raise UserError(f"{place}: a server is ended where it runs; accepted: its folder, on the machine where it runs")
    stopped = in_folder.stop(Path(place))
    if as_json:
        tables.print_json(stopped)
    else:
        print(f"{place}: stopped (pid {stopped['pid']}); resume with: {stopped['resume']}")


def show_why(place: str, name: str, *, as_json: bool) -> None:
    """Print why a pipeline waits and what would start it now, or where the time of its steps goes."""
    with closing(target_of(place)) as target:
        answer = _waiting(target, name)
        steps = target.step_causes(name) if answer["token"] is None else None
    if as_json:
        tables.print_json({**answer, "steps": steps})
        return
    if answer["token"] is None:
        print(f"{name} is {answer['status']}: it does not wait")
        if steps is not None:
            tables.show_step_causes(name, steps)
        return
    standing = (
        f"{answer['position']} of {answer['num_waiting']} in the queue" if answer["position"] else "not offered room"
    )
    print(f"{name}: {answer['token']} ({standing}, for {answer['waited_s']:.0f} s)")
    print(f"  {answer['reason']}")
    if answer["is_over_share"]:
        print(f"  {_over_share_in_words(answer)}")
    if answer.get("released_by"):
        print(f"  {_release_in_words(place, name, answer)}")
        return
    for change in answer["would_start_now_if"]:
        print(f"  would start now {_change_in_words(change)}")


def _release_in_words(place: str, name: str, answer: Mapping[str, Any]) -> str:
    """The command after which a held or parked pipeline starts, and when."""
    starts = "at once" if answer["would_start_now_if"] else "once there is room"
    return f"starts {starts} after: rlmux {answer['released_by']} {place} {name}"


def _waiting(target: RunTarget, name: str) -> dict[str, Any]:
    """The controller's answer; for a run that is over, the pipeline's status."""
    try:
        return target.send_command("why", name)
    except UserError:
        shown = target.status()
        if shown["pid"] is not None:
            raise
    if name not in shown["pipelines"]:
        raise UserError(f"no pipeline {name!r}; accepted: {', '.join(shown['pipelines']) or 'none yet'}")
    return {"pipeline": name, "status": shown["pipelines"][name]["status"], "token": None}


def _over_share_in_words(answer: Mapping[str, Any]) -> str:
    share = f"{answer['share']:.3g} of a pool of late, by its weight, where {answer['fair_share']:.3g} is fair"
    first = "this one" if answer["first"] == answer["pipeline"] else answer["first"]
    when = "is unknown" if answer["starts_s"] is None else f"is expected at {answer['starts_s']:.0f} s, for {first}"
    return f"{answer['project'] or 'it'} is over its share: {share}; the next start {when}"


def set_shares(place: str, file: str) -> None:
    """Have the section `shares` of a file hold in the run from now on."""
    from rlmux.config.load import read_text
    from rlmux.config.shares import parse_shares

    text = read_text(Path(file))
    parse_shares(text, file)
    with closing(target_of(place)) as target:
        target.set_shares(text, file)


def show_usage(place: str, *, as_json: bool) -> None:
    """Print what users and projects have used."""
    with closing(target_of(place)) as target:
        answer = target.usage()
    if as_json:
        tables.print_json(answer)
    elif not answer["accounts"]:
        print("nothing is counted: no pipeline names a user or project, and no shares are set")
    else:
        tables.print_rows([_usage_row(account) for account in answer["accounts"]])


_LIMITS = (
    ("max_running", "pipelines"),
    ("max_waiting", "waiting"),
    ("max_devices", "devices"),
    ("device_hours_a_day", "h a day"),
    ("max_usd_per_hour", "$ an hour"),
)
"""Keys of a quota, and what each is in words."""


def _usage_row(account: Mapping[str, Any]) -> dict[str, Any]:
    quota = account["quota"]
    limits = [f"{text} {quota[key]:g}" for key, text in _LIMITS if quota.get(key) is not None]
    if quota.get("budget_usd") is not None:
        limits.append(f"${account['spent_usd']:.2f} of ${quota['budget_usd']:.2f} for {quota['budget_days']:g} days")
    return {
        "project": account["project"] or "-",
        "user": account["user"] or "-",
        "weight": f"{account['weight']:g}",
        "share": f"{account['share']:.3g}",
        "fair": f"{account['fair_share']:.3g}",
        "over": "yes" if account["is_over_share"] else "no",
        "device-hours": f"{sum(account['device_hours'].values()):.3f}",
        "today": f"{account['device_hours_today']:.3f}",
        **({"dollars": f"{account['usd']:.2f}"} if account.get("usd") is not None else {}),
        "running": account["running"],
        "waiting": account["waiting"],
        "quota": ", ".join(limits) or "-",
    }


def _change_in_words(change: Mapping[str, Any]) -> str:
    match change["key"]:
        case "without":
            return f"without {change['to']}"
        case key:
            return f"with {key}: {change['to']:g} instead of {change['was']:g}"


def show_submission(pipelines: Sequence[Mapping[str, Any]], *, as_json: bool) -> int:
    """One line for each pipeline; exit code 1 if one was refused."""
    if as_json:
        tables.print_json({"pipelines": pipelines})
    else:
        for pipeline in pipelines:
            print(f"{pipeline['pipeline']}: {_in_words(pipeline)}")
    return int(any(pipeline["outcome"] == "refused" for pipeline in pipelines))


def _in_words(pipeline: Mapping[str, Any]) -> str:
    match pipeline["outcome"]:
        case "placed":
            nodes = " ".join([*pipeline["rollout_nodes"], *pipeline["train_nodes"]])
            if pipeline["group"] is None:
                return f"placed as a filler on {nodes}"
            return f"placed ({pipeline['kind']}) in group {pipeline['group']} on {nodes}"
        case "upcoming":
            return f"comes at {pipeline['at_s']:.1f} s of the run"
        case outcome:
            return f"{outcome}: {pipeline['reason']}" if pipeline.get("reason") else str(outcome)


def show_status(place: str, *, as_json: bool, is_once: bool, with_removed: bool = False) -> None:
    """Print the status; on a terminal redraw it while the run goes on, until it ends or Ctrl-C.

    `with_removed`: pipelines too whose files are all removed; JSON has them always.
    """
    with closing(target_of(place)) as target:
        shown = target.status()
        if as_json:
            tables.print_json(shown)
        elif is_once or not shown["is_going_on"] or not sys.stdout.isatty():
            _print_status(_without_removed(shown, with_removed))
        else:
            _redraw(target, with_removed)


def _without_removed(shown: dict[str, Any], with_removed: bool) -> dict[str, Any]:
    """The status without the pipelines that are removed, and their number."""
    if with_removed:
        return shown
    left = {name: row for name, row in shown["pipelines"].items() if not is_removed(row.get("removed"))}
    return {**shown, "pipelines": left, "num_removed": len(shown["pipelines"]) - len(left)}


def _redraw(target: RunTarget, with_removed: bool) -> None:
    from rich.live import Live

    shown = _without_removed(target.status(), with_removed)
    with Live(_tables(shown), auto_refresh=False, transient=True) as display:
        try:
            while shown["is_going_on"]:
                time.sleep(_REDRAW_S)
                shown = _without_removed(target.status(), with_removed)
                display.update(_tables(shown), refresh=True)
        except KeyboardInterrupt:
            pass
    _print_status(shown)


def _print_status(shown: Mapping[str, Any]) -> None:
    print(heading(shown) + "\n")
    tables.print_rows(_pipeline_rows(shown))
    for name, row in shown["pipelines"].items():
        if "rounds" in row:
            print(f"{name}: {tables.rounds_text(row['rounds'])}")
    for line in (*_try_lines(shown), *_removed_lines(shown), *_slo_lines(shown)):
        print(line)
    print()
    tables.print_rows(_device_rows(shown))
    if shown["alerts"]:
        print()
        tables.print_rows(_alert_rows(shown))


def _tables(shown: Mapping[str, Any]) -> Table:
    from rich.table import Table

    both = Table.grid(padding=(1, 0))
    both.add_row(heading(shown))
    for rows in (_pipeline_rows(shown), _device_rows(shown), _alert_rows(shown)):
        if rows:
            both.add_row(tables.table_of(rows))
    for line in (*_try_lines(shown), *_removed_lines(shown), *_slo_lines(shown)):
        both.add_row(line)
    return both


def _try_lines(shown: Mapping[str, Any]) -> list[str]:
    """Which try each pipeline is in that was retried, and how the ones before ended."""
    return [f"{name}: {tries_text(row['tries'])}" for name, row in shown["pipelines"].items() if row.get("tries")]


def _removed_lines(shown: Mapping[str, Any]) -> list[str]:
    """What was removed of each pipeline, and how many are not shown since all of theirs was."""
    rows = shown["pipelines"].items()
    lines = [f"{name}: {removed_text(removed)}" for name, row in rows for removed in row.get("removed", ())]
    if num_removed := shown.get("num_removed"):
        lines.append(f"{num_removed} removed (--all shows them)")
    return lines


def _slo_lines(shown: Mapping[str, Any]) -> list[str]:
    """Stated probability of each pipeline's SLO, and the bounds on the mean of its coming steps."""
    return [f"{name}: {words}" for name, row in shown["pipelines"].items() if (words := slo_words(row))]


def heading(shown: Mapping[str, Any]) -> str:
    """One line on a run's status: policy, seconds, and whether a process runs it now."""
    process = "no answer: it is busy, stopped or hangs" if shown["pid"] is None else f"pid {shown['pid']}"
    going = f"goes on ({process})" if shown["is_going_on"] else "nothing runs here now"
    kept_open = ", kept open" if shown["is_kept_open"] else ""
    return f"policy {shown['policy']}, {shown['now_s']:.0f} s, {going}{kept_open}"


def _alert_rows(shown: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "alert": f"{alert['level']}: {alert['rule']}",
            "pipeline": alert["pipeline"] or "",
            "since step": alert["step"] if alert["step"] is not None else "",
            "seen": alert["text"],
        }
        for alert in shown["alerts"]
    ]


def _pipeline_rows(shown: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for name, pipeline in shown["pipelines"].items():
        reward = (
            "-"
            if pipeline["reward_last"] is None
            else f"{pipeline['reward_first']:.3f} → {pipeline['reward_last']:.3f}"
        )
        is_filler = "score" in pipeline
        nodes = pipeline.get("hosts") or [*pipeline["rollout_nodes"], *pipeline["train_nodes"]]
        if is_filler and pipeline["score"] is not None:
            reward = f"mean {pipeline['score']:.3f}"
        rows.append(
            {
                "pipeline": name,
                "status": f"{pipeline['status']}, filler" if is_filler else pipeline["status"],
                "step": f"{pipeline['step']}/{'∞' if pipeline['num_steps'] is None else pipeline['num_steps']}",
                "reward": reward,
                "slowdown": "-" if pipeline["step_slowdown"] is None else f"{pipeline['step_slowdown']:.2f}",
                "accepts": "-" if pipeline["slo_slowdown"] is None else f"{pipeline['slo_slowdown']:g}",
                "expected": "-" if pipeline["expected_slowdown"] is None else f"{pipeline['expected_slowdown']:.2f}",
                "promise": pipeline["promise"] or "-",
                "nodes": " ".join(nodes) or "-",
                "doing": pipeline["doing"] or pipeline["reason"] or "-",
            }
        )
    for submission in shown["upcoming"]:
        row = dict.fromkeys(("step", "reward", "slowdown", "accepts", "expected", "promise", "nodes"), "-")
        rows.append(
            {
                "pipeline": submission["pipeline"],
                "status": "upcoming",
                **row,
                "doing": f"comes at {submission['at_s']:.0f} s",
            }
        )
    return rows


def _device_rows(shown: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for name, device in shown["devices"].items():
        held = (
            f"{device['pipeline']}: {device['stage'].replace('_', ' ')} {device['step']}".removesuffix(" 0")
            if device["pipeline"]
            else "-"
        )
        adapters = ", ".join(
            f"{phase} {room['here']}, room for {room['more']} more"
            for phase, room in device.get("adapters", {}).items()
        )
        rows.append({"device": name, "held by": held, "adapters": adapters or "-"})
    if all(row["adapters"] == "-" for row in rows):
        return [{key: row[key] for key in ("device", "held by")} for row in rows]
    return rows


def show_logs(place: str, name: str, *, is_following: bool) -> None:
    """Print what a pipeline's workers printed; following, keep printing until the pipeline is over."""
    with closing(target_of(place)) as target:
        shown = target.status()
        known = [*shown["pipelines"], *(submission["pipeline"] for submission in shown["upcoming"])]
        if name not in known:
            raise UserError(f"{place}: no pipeline {name!r}; accepted: {', '.join(known) or 'none yet'}")
    away_s = _AWAY_S if is_following and is_url(place) else 0.0
    with closing(target_of(place, inputs.print_notice, patience_s=away_s)) as target, suppress(KeyboardInterrupt):
        position = 0
        for is_last in _until_over(target, name, away_s) if is_following else (True,):
            text, position = target.log(name, position)
            sys.stdout.write(text)
            sys.stdout.flush()
            if not is_last:
                time.sleep(_FOLLOW_S)


def _until_over(target: RunTarget, name: str, away_s: float) -> Iterator[bool]:
    """False while the pipeline may still print, then True: it is over, or nothing has run it for `away_s`."""
    stopped_s: float | None = None
    while True:
        shown = target.status()
        status_now = shown["pipelines"].get(name, {}).get("status", "upcoming")
        now_s = time.monotonic()
        stopped_s = None if shown["is_going_on"] else now_s if stopped_s is None else stopped_s
        is_given_up = stopped_s is not None and now_s - stopped_s >= away_s
        is_over = is_given_up or status_now in _OVER
        yield is_over
        if is_over:
            return
