"""The random calls against operators built with the address and thread sanitizers.

PYTHONPATH=build_backend python -m python_tests.ops.sanitized_calls [--calls 10000]
"""

from __future__ import annotations

import subprocess
import sys

from jachess_build.sanitized import CACHE, SANITIZERS, build_operators


def main(arguments: list[str]) -> int:
    """1 if a call was wrong or a sanitizer had something to report."""
    failed = []
    CACHE.mkdir(parents=True, exist_ok=True)
    for sanitizer in SANITIZERS.values():
        library = build_operators(sanitizer, CACHE / f"_ops_{sanitizer.name}.so")
        command = [sys.executable, "-m", "python_tests.ops.random_calls", *arguments]
        done = subprocess.run(command, env=sanitizer.preloading(library), check=False)
        print(f"{' '.join(sanitizer.flags)}: {'failed' if done.returncode else 'nothing found'}")
        if done.returncode:
            failed.append(sanitizer.name)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
