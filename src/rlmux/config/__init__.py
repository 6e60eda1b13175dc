"""The user's YAML file as typed values: one file for `run`, `simulate` and `plan`."""

from rlmux.config.load import PipelineSpec, Purpose, Spec, load_spec

__all__ = ["PipelineSpec", "Purpose", "Spec", "load_spec"]
