"""One thread for all tests of this folder, and a fixture of theirs."""

from python_tests.threads import one_thread  # noqa: F401  a fixture

from .runs import equal_directions  # noqa: F401  a fixture
