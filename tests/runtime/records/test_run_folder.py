"""The folder of a run, as a start finds it."""

from __future__ import annotations

import pytest

from rlmux.core.errors import UserError
from rlmux.log.folder_lock import OWNER_NAME
from rlmux.runtime.records.run_folder import prepare_folder


def test_a_folder_with_the_name_of_a_killed_start_alone_counts_as_empty(tmp_path):
    (tmp_path / OWNER_NAME).write_text("{}")  # killed before its log was there
    prepare_folder(tmp_path, is_overwriting=False).release()
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UserError, match="not empty; give another folder"):
        prepare_folder(tmp_path, is_overwriting=False)
