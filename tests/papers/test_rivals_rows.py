"""`rlmux reproduce rivals`: a row for each system on each workload."""

from __future__ import annotations

from pathlib import Path

from rlmux import papers
from rlmux.papers import rivals_rows


def test_every_system_has_a_row_on_every_workload_and_misses_name_a_cause(monkeypatch, tmp_path):
    monkeypatch.setattr(rivals_rows, "NUM_STEPS", 2)
    monkeypatch.setattr(rivals_rows, "NUM_DEVICES", 3)
    monkeypatch.setattr(rivals_rows, "_ETAS", (0, 1))
    report = papers.reproduce("rivals", num_seeds=1, out=tmp_path)
    systems = [row["figure"].partition(":")[0] for row in report["rows"]]
    assert systems == 4 * list(rivals_rows.SYSTEMS)
    assert all(row["ours"] > 0 and (row["reached"] or row["cause"]) for row in report["rows"])
    (picture,) = report["pictures"]
    drawn = Path(picture).read_text(encoding="utf-8")
    assert all(name in drawn for name in ("areal", "laminar", "streamrl", "asyncflow"))
