"""PEP 517 backend: setuptools, built against the torch of the environment installed into.

A static `requires = ["torch"]` would fetch another torch of several GB into the isolated build
environment. The operators use torch's stable ABI, so any torch from 2.10 on serves as headers;
one is fetched only where the target environment has none.
"""

from typing import Any

from setuptools import build_meta as _setuptools

from .environment import expose_torch

_EXTRA = ["ninja"]


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """Return the build requirements of a wheel: torch only where the environment has none."""
    return _EXTRA if expose_torch() else [*_EXTRA, "torch>=2.10", "numpy"]


get_requires_for_build_editable = get_requires_for_build_wheel


def get_requires_for_build_sdist(config_settings: Any = None) -> list[str]:
    """Return no requirements: a source distribution compiles nothing."""
    return []


def build_wheel(
    wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None
) -> str:
    """Build the wheel, operators included."""
    expose_torch()
    return _setuptools.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None
) -> str:
    """Build in place and make the checkout importable."""
    expose_torch()
    return _setuptools.build_editable(wheel_directory, config_settings, metadata_directory)


build_sdist = _setuptools.build_sdist
prepare_metadata_for_build_wheel = _setuptools.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = _setuptools.prepare_metadata_for_build_editable
