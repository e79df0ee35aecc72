"""Random programs: chains of torch calls, whose jets are held against reverse mode over the same
lines on plain tensors (`python -m python_tests.programs`)."""
