"""What changes when a model's files do, so that a result is never taken for another model's."""

from __future__ import annotations

import hashlib
from pathlib import Path

from .models import load_config

_CHUNK = 1 << 22
_SUFFIXES = (".json", ".txt", ".model", ".safetensors")


def model_version(model: str) -> str:
    """Digest of a folder's configuration, tokenizer and weights, or the hub's commit.

    Raises:
        DataError: the model's configuration cannot be loaded.
    """
    folder = Path(model)
    if not folder.is_dir():
        return str(getattr(load_config(model), "_commit_hash", None))
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in _SUFFIXES:
            digest.update(path.name.encode())
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
    return digest.hexdigest()[:16]
