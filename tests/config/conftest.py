"""A small valid file, and a way to break it in one place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from rlmux.config import Purpose, Spec, load_spec
from rlmux.core.errors import SpecError

GOOD = """\
cluster:
  pools:
    rollout: {devices: 1}
    train: {devices: 1}
defaults:
  steps: 60
pipelines:
  - name: sort
    task: {name: sort, digits: 5}
    rollout:
      slots: 32
  - name: reverse
    task: reverse
"""


@pytest.fixture
def good() -> str:
    return GOOD


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Spec]:
    """`load(text, *overrides)` writes two.yaml and loads it under that relative name."""
    monkeypatch.chdir(tmp_path)

    def load_text(text: str, *overrides: str, purpose: Purpose = Purpose.RUN, **options: object) -> Spec:
        Path("two.yaml").write_text(text, encoding="utf-8")
        return load_spec("two.yaml", overrides=overrides, purpose=purpose, **options)  # type: ignore[arg-type]

    return load_text


@pytest.fixture
def complaint(load: Callable[..., Spec]) -> Callable[..., str]:
    """The one line that a wrong file is refused with."""

    def complain(text: str, *overrides: str, replace: Sequence[tuple[str, str]] = (), **options: object) -> str:
        for old, new in replace:
            assert text.count(old) == 1, f"{old!r} is there {text.count(old)} times"
            text = text.replace(old, new)
        with pytest.raises(SpecError) as caught:
            load(text, *overrides, **options)
        message = str(caught.value)
        assert "\n" not in message
        return message

    return complain
