"""One script per question (README.md); run them with ``python -m benchmarks.NAME``."""
