"""Displays of a run's queue, alerts, trajectories and step table, and of device time, from a folder or a server.

queue, alerts, samples, export     one RunTarget answers them all (rlmux/client)
usage --since                      every run of a folder, or every lane of a server
"""

from __future__ import annotations

import csv
import io
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TextIO

from rlmux.cli import progress, tables
from rlmux.client.target import is_url, target_of
from rlmux.client.trackers import TRACKERS, RunOrigin, check_installed, follow_run, tracker_of
from rlmux.core.errors import UserError
from rlmux.core.json_text import parse_json
from rlmux.report.usage import KEYS, NO_VALUE, UsageSums, add_run, runs_in, window_of
from rlmux.runtime.records import folders

FORMATS = ("jsonl", "csv")
_MAX_SPENT_ROWS = 30
_MAX_GAPS = 5
HF = "hf"
"""Format of weights: a folder that transformers loads."""


def show_queue(place: str, *, as_json: bool) -> None:
    """Print the waiting pipelines in scheduling order."""
    with closing(target_of(place)) as target:
        queue = target.queue()
    if as_json:
        tables.print_json(queue)
        return
    rows = [
        {
            "place": item["position"] or "-",
            "pipeline": item["pipeline"],
            "waits for": f"{item['waited_s']:.0f} s",
            "because": f"{item['token']}: {item['reason']}" if item["reason"] else item["token"],
        }
        for item in queue["items"]
    ]
    rows += [
        {
            "place": "-",
            "pipeline": submission["pipeline"],
            "waits for": "",
            "because": f"comes at {submission['at_s']:.0f} s",
        }
        for submission in queue["upcoming"]
    ]
    if rows:
        tables.print_rows(rows)
    else:
        print("nothing waits")


def show_alerts(place: str, acknowledged: str | None, pipeline: str | None, *, as_json: bool) -> None:
    """Print the firing alerts; `acknowledged`: a rule to acknowledge first."""
    with closing(target_of(place)) as target:
        alerts = target.alerts() if acknowledged is None else target.acknowledge(acknowledged, pipeline)
    alerts = [alert for alert in alerts if pipeline is None or alert["pipeline"] == pipeline]
    if as_json:
        tables.print_json({"alerts": alerts})
        return
    if not alerts:
        print("nothing is wrong")
    for alert in alerts:
        whose = f" {alert['pipeline']}" if alert["pipeline"] else ""
        since = f" since step {alert['step']}" if alert["step"] is not None else ""
        seen = f" (seen by {alert['acknowledged']['by']})" if alert["acknowledged"] else ""
        print(f"{alert['level']}: {alert['rule']}{whose}{since}{seen}\n  {alert['text']}\n  {alert['advice']}")


def show_samples(place: str, name: str, filters: Mapping[str, Any], *, sort: str, limit: int, as_json: bool) -> None:
    """Print trajectories, a line each."""
    with closing(target_of(place)) as target:
        found = target.samples(name, filters, sort=sort, at=0, limit=limit)
    if as_json:
        tables.print_json(found)
    elif not found["items"]:
        print("no trajectory meets that")
    else:
        tables.print_rows([_sample_row(sample) for sample in found["items"]])


def _sample_row(sample: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "place": f"{sample['step']}/{sample['prompt']}/{sample['sample']}",
        "reward": f"{sample['reward']:.3f}",
        "advantage": f"{sample['advantage']:+.3f}",
        "tokens": sample["tokens"],
        "stop": sample["stop"],
        "begins": " ".join(sample["start"].split())[:60],
    }


def show_sample(place: str, name: str, at: str, *, special_tokens: bool, as_json: bool) -> None:
    """Print one trajectory, of `STEP/PROMPT/SAMPLE`, with its text."""
    parts = at.split("/")
    if len(parts) != 3 or not all(part.isdecimal() and len(part) < 8 for part in parts):
        raise UserError(f"--at {at!r}: accepted: STEP/PROMPT/SAMPLE, three whole numbers")
    with closing(target_of(place)) as target:
        found = target.sample(name, *map(int, parts), special_tokens=special_tokens)
    if as_json:
        tables.print_json(found)
        return
    print(
        f"reward {found['reward']:.3f}, advantage {found['advantage']:+.3f}, {found['tokens']} tokens, {found['stop']}"
    )
    print(f"\nprompt:\n{found['prompt_text']}")
    for turn in found["said"]:
        print(f"\n{turn['role']}:\n{turn['text']}")


def export(place: str, name: str | None, to: str, out: str | None, *, is_following: bool = False) -> None:
    """Write the table of steps, of one pipeline or of all; a file that is there gets the steps that it has not.

    `is_following`: until the run is over, for a tracker.
    """
    if is_following:
        _follow(place, name, to, out)
        return
    if to in TRACKERS:
        _export_to_tracker(place, name, to, out)
        return
    if to not in FORMATS:
        raise UserError(f"--to {to!r}: accepted: {', '.join((*FORMATS, *TRACKERS, HF))}")
    path = None if out is None else Path(out)
    known = set() if path is None else set(_known(path, to))
    with closing(target_of(place)) as target:
        every = target.steps(name)
    rows = [
        {"pipeline": pipeline, **row}
        for pipeline, its in every.items()
        for row in its
        if (pipeline, row["step"]) not in known
    ]
    if path is None:
        _write(rows, to, sys.stdout, has_head=True)
        return
    try:
        with path.open("a", encoding="utf-8", newline="") as file:
            _write(rows, to, file, has_head=file.tell() == 0, columns=_columns_of(path))
    except OSError as error:
        raise UserError(f"--out {path}: {error.strerror}; accepted: a file that can be written") from None
    print(f"rlmux: {len(rows)} steps written to {path}, {len(known)} were there", file=sys.stderr)


def check_no_model_options(to: str, *, step: int | None, is_merged: bool) -> None:
    """Raises UserError for options of weights with a format of the step table."""
    for option, is_given in (("--step", step is not None), ("--merge", is_merged)):
        if is_given:
            raise UserError(f"{option} with --to {to}: accepted: --to {HF}, which exports weights")


def export_model(place: str, name: str | None, out: str | None, *, step: int | None, is_merged: bool) -> None:
    """Write a pipeline's weights as a Hugging Face model."""
    if is_url(place):
        raise UserError(f"--to {HF}: {place} is a server; accepted: the folder of the run, on its machine")
    if name is None or out is None:
        raise UserError(f"--to {HF}: accepted: with NAME of a pipeline and --out FOLDER")
    with closing(target_of(place)) as target:
        known = target.status()["pipelines"]
    if name not in known:
        raise UserError(f"no pipeline {name!r}; accepted: {', '.join(known) or 'none yet'}")
    from rlmux.runtime.model_export import export_model

    written = export_model(Path(place), name, Path(out), step=step, is_merged=is_merged)
    print(f"rlmux: {name}: weights of step {written} written to {out}", file=sys.stderr)


def _follow(place: str, name: str | None, to: str, out: str | None) -> None:
    if to not in TRACKERS:
        raise UserError(f"--follow with --to {to}: accepted: {', '.join(TRACKERS)}")
    if is_url(place):
        raise UserError(f"--follow: {place} is a server; accepted: the folder of the run, on its machine")
    check_installed(to)
    folders.check_run(Path(place))
    print(f"rlmux: {follow_run(Path(place), to, out, name)} steps written to {to}; the run is over", file=sys.stderr)


def _export_to_tracker(place: str, name: str | None, to: str, out: str | None) -> None:
    """Export the missing steps to a tracker."""
    check_installed(to)
    with closing(target_of(place)) as target:
        every, header, shown = target.steps(name), target.header(), target.status()
    for pipeline, rows in every.items():
        row = shown["pipelines"].get(pipeline, {})
        config = {"run_id": header["run_id"], "policy": shown["policy"], "pipeline": pipeline}
        config |= {key: row[key] for key in ("num_steps", "promise") if row.get(key) is not None}
        origin = RunOrigin(run_id=header["run_id"], created=header["created"], pipeline=pipeline, config=config)
        with closing(tracker_of(to, out, origin)) as tracker:
            known = tracker.known()
            new = [row for row in rows if row["step"] not in known]
            if new:
                tracker.add(new)
        print(f"rlmux: {pipeline}: {len(new)} steps written to {to}, {len(known)} were there", file=sys.stderr)


_COLUMNS = (
    *("pipeline", "step", "end_s", "seconds", "solo_s", "slowdown"),
    *("weights_sha256", "metrics", "stages", "weights_checksum", "delivery"),
)
"""Columns of CSV; `metrics`, `stages` and `delivery` are JSON."""


def _columns_of(path: Path) -> Sequence[str]:
    """The columns of a table that is there; ours for a new one."""
    with path.open(encoding="utf-8", newline="") as file:
        return next(csv.reader(file), _COLUMNS)


def _write(
    rows: Iterable[Mapping[str, Any]], to: str, file: TextIO, *, has_head: bool, columns: Sequence[str] = _COLUMNS
) -> None:
    if to == "jsonl":
        for row in rows:
            file.write(json.dumps(row) + "\n")
        return
    table = csv.DictWriter(file, columns, lineterminator="\n", extrasaction="ignore")
    if has_head:
        table.writeheader()
    for row in rows:
        table.writerow({**row, **{key: json.dumps(row[key]) for key in ("metrics", "stages", "delivery")}})


def _known(path: Path, to: str) -> Iterator[tuple[str, int]]:
    """(pipeline, step) of the rows that a file has; half a row at its end, of a killed writer, is taken out."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"--out {path}: {error.strerror}; accepted: a file of this format, or none") from None
    whole = data[: data.rfind(b"\n") + 1]
    try:
        text = whole.decode()
        rows: Sequence[Any] = (
            [parse_json(line) for line in text.splitlines()]
            if to == "jsonl"
            else list(csv.DictReader(io.StringIO(text)))
        )
        found = [(str(row["pipeline"]), int(row["step"])) for row in rows]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"--out {path}: not a table of steps as {to}; accepted: such a file, or a new one") from None
    if whole != data:
        with path.open("r+b") as file:
            file.truncate(len(whole))
    yield from found


def show_spent(place: str, since: str, until: str | None, by: str, *, as_json: bool) -> None:
    """Print device-hours and dollars by a key, by cause, and the longest idle stretches."""
    if by not in KEYS:
        raise UserError(f"--by {by!r}: accepted: {', '.join(KEYS)}")
    found = (
        _spent_on_server(place, since, until)
        if is_url(place)
        else _spent_in_folders(Path(place), since, until, as_json)
    )
    for lane, reason in found["left_out"].items():
        print(f"rlmux: {lane} is left out: {reason}", file=sys.stderr)
    if as_json:
        tables.print_json(found)
    else:
        _print_spent(found, by)


def _spent_on_server(place: str, since: str, until: str | None) -> dict[str, Any]:
    from rlmux.client.on_server import OnServer

    with closing(OnServer(place, lambda text: None)) as server:
        return server.usage_since(since, until)


def _spent_in_folders(folder: Path, since: str, until: str | None, is_quiet: bool) -> dict[str, Any]:
    sums, runs = UsageSums(window_of(since, until, time.time())), runs_in(folder)
    with progress.bar("runs", is_quiet=is_quiet) as update:
        for number, (name, path) in enumerate(runs.items(), 1):
            add_run(sums, name, path)
            if update is not None:
                update(number, len(runs))
    return sums.to_json()


def _print_spent(found: Mapping[str, Any], by: str) -> None:
    total, span = found["total"], f"{found['since']} to {found['until']}"
    if not total["device_hours"]:
        print(f"no device time from {span}; to look further back: --since 90d, or a date")
        return
    is_priced = total["usd"] > 0.0
    busy = total["busy_hours"] / total["device_hours"]
    dollars = f", ${total['usd']:,.2f}" if is_priced else ""
    print(f"{span}: {total['device_hours']:.4g} device-hours, {busy:.0%} of them computed{dollars}")
    for key in dict.fromkeys((by, "cause")):
        _print_spent_rows(found["by"][key], key, total["device_hours"], is_priced=is_priced)
    gaps = found["idle_gaps"][:_MAX_GAPS]
    if gaps:
        print("\nlongest idle stretches")
        tables.print_rows(
            [{**gap, "price": f"${gap['usd']:,.2f}" if is_priced else ""} for gap in gaps],
            "device | lane | begins | hours: hours .4g | because: cause" + (" | dollars: price" if is_priced else ""),
        )


def _print_spent_rows(rows: list[dict[str, Any]], key: str, all_hours: float, *, is_priced: bool) -> None:
    print()
    shown = [
        {
            key: "(none)" if row[key] == NO_VALUE else row[key],
            **({"of project": row["of_project"]} if key == "pipeline" else {}),
            "device-hours": f"{row['device_hours']:.4g}",
            "of all": f"{row['device_hours'] / all_hours:.1%}",
            **{kind: f"{row[f'{kind}_hours']:.4g}" for kind in ("busy", "switch", "bubble", "idle") if key != "cause"},
            **({"dollars": f"{row['usd']:,.2f}"} if is_priced else {}),
        }
        for row in rows[:_MAX_SPENT_ROWS]
    ]
    tables.print_rows(shown)
    if len(rows) > _MAX_SPENT_ROWS:
        print(f"and {len(rows) - _MAX_SPENT_ROWS} more: --json has all")
