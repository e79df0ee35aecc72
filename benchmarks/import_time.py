"""What `import jachess_ext` adds to `import torch`, and what `jachess --help` takes.

    python -m benchmarks.import_time                 medians of 11 rounds
    python -m benchmarks.import_time --rounds 31

Every program runs in a fresh process, all of them in turn in every round, so that a busy machine
slows all alike.  Bytecode is used, as in an installation; an unmeasured round writes it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

PROGRAMS = {
    "import torch": ["-c", "import torch"],
    "import torch, jachess_ext": ["-c", "import torch, jachess_ext"],
    "... and use jet": ["-c", "import torch, jachess_ext; jachess_ext.jet"],
    "... and use every name of the core": [
        "-c",
        "import torch, jachess_ext as jx; jx.jet, jx.ntk, jx.smoothness, jx.ops",
    ],
    "python": ["-c", ""],
    "jachess --help": ["-m", "jachess_ext", "--help"],
}
AGAINST = dict.fromkeys(list(PROGRAMS)[1:4], "import torch") | {"jachess --help": "python"}


def seconds(arguments: list[str]) -> float:
    """Return the time of a fresh process."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    begin = time.perf_counter()
    subprocess.run(
        [sys.executable, *arguments], env=environment, stdout=subprocess.DEVNULL, check=True
    )
    return time.perf_counter() - begin


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=11, help="how often each program runs")
    rounds = parser.parse_args().rounds
    taken: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for number in range(rounds + 1):
        for name, arguments in PROGRAMS.items():
            duration = seconds(arguments)
            if number:
                taken[name].append(duration)
    print("| program | median s | quickest s | more than | median of differences s |")
    print("|---|---|---|---|---|")
    for name, times in taken.items():
        base = AGAINST.get(name, "")
        differences = [a - b for a, b in zip(times, taken.get(base, times), strict=True)]
        more = f"{statistics.median(differences):.3f}" if base else ""
        print(f"| {name} | {statistics.median(times):.3f} | {min(times):.3f} | {base} | {more} |")


if __name__ == "__main__":
    main()
