"""One thread for all tests of this folder, and a fixture of theirs."""

import jachess_ext.lab.attack  # noqa: F401  its method is one of METHODS then
from python_tests.threads import one_thread  # noqa: F401  a fixture

from .runs import equal_directions  # noqa: F401  a fixture
