"""One thread for all tests of this folder, and a fixture of theirs."""

from python_tests.threads import one_thread

from .runs import equal_directions
