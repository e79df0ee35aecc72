"""Fixtures of this folder."""

import jachess_ext.lab.attack  # noqa: F401  registers attack-augment
from python_tests.threads import one_thread  # noqa: F401  a fixture

from .runs import equal_directions  # noqa: F401  a fixture
