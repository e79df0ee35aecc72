"""One script per question of spec 05-measuring; run them with ``python -m benchmarks.NAME``."""
