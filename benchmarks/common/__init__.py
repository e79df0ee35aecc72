"""What the benchmark scripts share: command line, models, timing, memory and result files."""
