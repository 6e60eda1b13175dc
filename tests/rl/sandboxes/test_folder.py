"""A folder has no root of its own: paths lead below it."""

from __future__ import annotations

import pytest

from rlmux.core.errors import PipelineError


def test_absolute_paths_inside_are_below_the_folder(make):
    sandbox = make("folder")
    assert sandbox.path("/app/x") == sandbox.path("/") / "app" / "x"
    assert sandbox.path("/app").is_dir()


@pytest.mark.parametrize("path", ["app/x", "/app/../../x", ""])
def test_a_path_that_is_not_absolute_or_leads_out_is_refused(make, path):
    with pytest.raises(PipelineError, match="no absolute path"):
        make("folder").path(path)


def test_a_folder_is_put_into_the_one_that_is_there(make, tmp_path):
    sandbox = make("folder")
    (tmp_path / "new" / "inner").mkdir(parents=True)
    (tmp_path / "new" / "inner" / "a").write_text("a")
    sandbox.path("/app/inner").mkdir()
    sandbox.path("/app/inner/b").touch()
    sandbox.put(tmp_path / "new", "/app")
    assert sorted(path.name for path in sandbox.path("/app/inner").iterdir()) == ["a", "b"]
    sandbox.clear("/app")
    assert list(sandbox.path("/app").iterdir()) == []
