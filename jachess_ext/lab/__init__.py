"""What is built on the library: comparisons, live selection, attacks, the demo, the command."""
