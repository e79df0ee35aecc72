"""Optional libraries: imported where they are used, one clear sentence when one is missing."""

from __future__ import annotations

import importlib
from typing import Any

_DISTRIBUTIONS = {"sklearn": "scikit-learn"}


class MissingExtra(ImportError):
    """An optional library is needed and not installed; the message says how to install it."""


def require(module: str) -> Any:
    """Imports `module` and returns it.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.split(".")[0]
        if error.name is not None and error.name.split(".")[0] != package:
            raise
        raise MissingExtra(
            f"{_DISTRIBUTIONS.get(package, package)} is needed for this and not installed: "
            "pip install 'jachess-ext[demo]'"
        ) from None
