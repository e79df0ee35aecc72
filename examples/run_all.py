"""Runs every example for a few steps; one line each, exit status 1 where one fails.

An example whose library is not installed is named, and counts as failed.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from pathlib import Path

EXAMPLES = {
    "plain_loop": "torch",
    "accelerate_loop": "accelerate",
    "transformers_trainer": "transformers",
    "controls": "transformers",
    "trl_sft": "trl",
    "lightning_module": "lightning",
    "four_bit_lora": "bitsandbytes",
    "meanflow": "matplotlib",
    "hessian_vector": "transformers",
    "laplacian": "matplotlib",
    "poisson": "matplotlib",
    "score_matching": "matplotlib",
    "pac_bayes_phases": "matplotlib",
    "watch_smoothness": "lightning",
    "ntk_of_a_file": "datasets",
}
"""Script → the library it shows."""


def main() -> int:
    """Runs them; the exit status."""
    failed = False
    for name, library in EXAMPLES.items():
        if importlib.util.find_spec(library) is None:
            print(f"{name}: {library} is not installed; pip install '.[examples]'")
            failed = True
            continue
        start = time.perf_counter()
        command = [sys.executable, str(Path(__file__).with_name(f"{name}.py")), "--tiny"]
        run = subprocess.run(command, capture_output=True, text=True)
        last = (run.stdout.strip().splitlines() or [""])[-1]
        print(f"{name}: {last} ({time.perf_counter() - start:.0f} s)", flush=True)
        if run.returncode != 0:
            failed = True
            print(run.stderr, file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
