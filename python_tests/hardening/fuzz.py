"""Damaged files to every reader, for as long as one likes:

    python -m python_tests.hardening.fuzz --calls 20000 [--seed 0] [--readers grid results.jsonl]

A reader gives a result or refuses the file in one sentence; anything else is printed with the seed
that makes the file again, and ends the run with exit code 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from pathlib import Path

from .mutations import hostile, mutated
from .readers import READERS, Reader

LONGEST = 600
"""Characters of a refusal, without the path."""


def attempt(reader: Reader, folder: Path, content: bytes | None = None) -> str:
    """Read `content` (None: what is there); "read" or "refused".

    Raises:
        AssertionError: neither, as the message says.
    """
    path = folder / reader.file
    path.parent.mkdir(parents=True, exist_ok=True)
    if content is not None:
        path.write_bytes(content)
    before = {p for p in folder.rglob("*") if p.is_file()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reader.call(path)
        answer = "read"
    except reader.refusals as error:
        _check_sentence(error, path)
        answer = "refused"
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {traceback.format_exc()}") from error
    written = {p.name for p in folder.rglob("*") if p.is_file()} - {p.name for p in before}
    if reader.out is not None:
        wanted = {reader.out} if answer == "read" else set()
        assert written == wanted, f"{answer}, and these files were written: {written}"
        (folder / reader.out).unlink(missing_ok=True)
    return answer


def _check_sentence(error: Exception, path: Path) -> None:
    text = str(error).replace(str(path), "FILE").replace(str(path.parent), "FOLDER")
    assert text, "a refusal without words"
    assert "\n" not in text, f"a refusal of several lines: {text}"
    assert len(text) <= LONGEST, f"a refusal of {len(text)} characters: {text}"
    internal = (UnicodeError, KeyError, IndexError)
    assert not isinstance(error, internal), f"{type(error).__name__} is no sentence: {text}"


def main() -> int:
    """Run; 1 where something was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--readers", nargs="+", choices=READERS, default=list(READERS))
    options = parser.parse_args()
    answers: Counter[tuple[str, str]] = Counter()
    found: dict[str, int] = {}
    each = max(1, options.calls // len(options.readers))
    for name in options.readers:
        reader = READERS[name]
        files = [(label, content) for label, content in hostile(reader.valid).items()]
        for seed in range(options.seed, options.seed + each - len(files)):
            files.append((f"seed {seed}", mutated(reader.valid, seed)))
        for label, content in files[:each]:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    answers[name, attempt(reader, Path(folder), content)] += 1
                except AssertionError as error:
                    lines = str(error).strip().splitlines()
                    kind = f"{name}: {lines[0][:200]} … {' '.join(lines[-4:])[-400:]}"
                    if kind not in found:
                        print(f"{label}: {kind}", flush=True)
                    found[kind] = found.get(kind, 0) + 1
        shown = ", ".join(f"{n} {a}" for (r, a), n in sorted(answers.items()) if r == name)
        print(f"{name}: {shown}", flush=True)
    print(
        f"{sum(answers.values())} answered well, {sum(found.values())} faults of {len(found)} kinds"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
