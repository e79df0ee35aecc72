from python_tests.jet.compiling import fresh_dynamo  # noqa: F401  of tests that compile
from python_tests.one_thread import one_thread  # noqa: F401  of every test here
