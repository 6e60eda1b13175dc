"""The user's YAML file as one typed tree: the same file for `run`, `compare`, `simulate`, `plan` and `submit`.

Reading order: tree, figures, load, source_map, error_messages, file_kind, merge, derive, checks, import_checks,
shares, checkpoint_folder, serve_file, service_file, broker_file, schema_docs, json_schema.
"""

from rlmux.config.checks import Purpose
from rlmux.config.load import PipelineSpec, Spec, load_spec

__all__ = ["PipelineSpec", "Purpose", "Spec", "load_spec"]
