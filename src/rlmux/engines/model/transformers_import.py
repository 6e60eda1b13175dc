"""The import of transformers in half the time: the sources of its models are read once instead of twice.

    import transformers          reads thousands of files to list what each model exports, under names `models.*`
    import transformers.models   reads them again, for the same list without that prefix; here it reuses the first list

A release that makes its lists in another way is imported unchanged.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

_PREFIX = "models"


def import_transformers() -> None:
    """Import transformers and `transformers.models`."""
    import transformers
    from transformers.utils import import_utils

    read: Any = import_utils.define_import_structure
    folder = Path(transformers.__file__).parent / _PREFIX
    known = _known_exports(read, folder)

    def exports_of(module_path: str, prefix: str | None = None) -> Any:
        is_known = known is not None and prefix is None and Path(module_path) == folder / "__init__.py"
        return known if is_known else read(module_path, prefix)

    vars(import_utils)["define_import_structure"] = exports_of
    try:
        import transformers.models
    finally:
        vars(import_utils)["define_import_structure"] = read


def _known_exports(read: Any, folder: Path) -> dict[frozenset[str], dict[str, set[str]]] | None:
    """Exports by module and required packages, as `import transformers` found them; None if it keeps none.

    The mapping also has its other exports, modules without the prefix.
    """
    if getattr(read, "cache_info", None) is None or read.cache_info().currsize == 0:
        return None
    start = f"{_PREFIX}."
    return {
        needs: {module.removeprefix(start): names for module, names in exports.items() if module.startswith(start)}
        for needs, exports in read(folder, prefix=_PREFIX).items()
    }
