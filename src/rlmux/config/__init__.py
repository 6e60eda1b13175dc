"""The user's YAML file as one typed tree: the same file for `run`, `compare`, `simulate`, `plan` and `submit`."""

from rlmux.config.checks import Purpose
from rlmux.config.load import PipelineSpec, Spec, load_spec

__all__ = ["PipelineSpec", "Purpose", "Spec", "load_spec"]
