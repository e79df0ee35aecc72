"""The demo: fine-tunes a transformer on real text with and without JacHess, and reports."""
