"""Build of the C++/CUDA operators; pyproject.toml holds everything else about the package."""

import os
import sys
from pathlib import Path

from setuptools import setup

sys.path.insert(0, str(Path(__file__).resolve().parent / "build_backend"))

from jachess_build.environment import expose_torch

# Commands that compile nothing (sdist, metadata) must work without torch.
_COMPILING = {"build", "build_ext", "bdist_wheel", "editable_wheel", "install", "develop"}

arguments = {}
skip = os.environ.get("JACHESS_SKIP_EXTENSIONS", "0") not in ("", "0")
if not skip and _COMPILING.intersection(sys.argv[1:]):
    expose_torch()
    from jachess_build.extensions import extension_arguments

    arguments = extension_arguments()

setup(**arguments)
