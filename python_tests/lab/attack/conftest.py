"""One thread for all tests of this folder."""

from python_tests.threads import one_thread  # noqa: F401  a fixture
