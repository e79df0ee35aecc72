from python_tests.one_thread import one_thread  # noqa: F401  of every test here
