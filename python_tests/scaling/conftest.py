"""One thread for torch: the fits are small."""

from python_tests.threads import one_thread  # noqa: F401  a fixture
