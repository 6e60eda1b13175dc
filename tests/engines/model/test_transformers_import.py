"""The faster import of transformers tells its models what reading all their sources would tell."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("transformers")

SCRIPT = """
from pathlib import Path
import transformers
from transformers.utils import import_utils
from rlmux.engines.model.transformers_import import _known_exports, import_transformers

read = import_utils.define_import_structure
told = _known_exports(read, Path(transformers.__file__).parent / "models")
import_transformers()
assert import_utils.define_import_structure is read
assert read.cache_info().misses == 1, f"the sources were read {read.cache_info().misses} times"
assert read(transformers.models.__file__) == told
assert transformers.models.Qwen3Config is transformers.Qwen3Config
"""


@pytest.mark.slow
def test_what_models_export_is_read_once_and_is_what_reading_again_finds(tmp_path):
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
