"""Damaged files: the bytes of a valid one, changed as disks, editors and hostile hands change them.

`hostile` is a list, the same every time; `mutated` draws from a seed.
"""

from __future__ import annotations

import random
import re

NUMBER = re.compile(rb"-?\d+(\.\d+)?")
STRANGE = [
    *(b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1", b"0", b"1e308", b"5e-324", b"null"),
    *(b"9" * 25, b"9" * 5000, b"true", b'"text"', b"[]", b"{}", b'"\\ud800"', b"1_0", b"0x10"),
    *(b'"\\u2028"', "\u0664".encode(), b"--5", b'""'),
]
INSERTED = [
    *(b"\x00", b"\xff\xfe", b"\xc3", b"\xef\xbb\xbf", b"\r\n", b"\r", b"\n", b'"', b"'", b","),
    *(b"{", b"}", b"[", b"]", b"\\", b"\t", b":", b"\xe2\x80\xa8", b"\xed\xa0\x80", b"<script>"),
]


def hostile(valid: bytes) -> dict[str, bytes]:
    """Damages by name; those of text make no sense of a binary file, and do no harm there."""
    half = len(valid) // 2
    return {
        "empty": b"",
        "white space": b" \n\n\t\n",
        "a NUL byte": valid[:half] + b"\x00" + valid[half:],
        "NUL bytes only": b"\x00" * 64,
        "not UTF-8": valid[:half] + b"\xff" + valid[half:],
        "UTF-16": valid.decode("latin-1").encode("utf-16"),
        "a byte-order mark": b"\xef\xbb\xbf" + valid,
        "two byte-order marks": b"\xef\xbb\xbf" * 2 + valid,
        "CRLF": valid.replace(b"\n", b"\r\n"),
        "CR alone": valid.replace(b"\n", b"\r"),
        "twice": valid * 2,
        "nested deeply": b"[" * 100_000,
        "nested objects": b'{"a":' * 100_000,
        "nested deeply and closed": b"[" * 50_000 + b"]" * 50_000,
        "a long line": b"a" * 300_000,
        "a quote without an end": valid + b'"',
        "gzip header": b"\x1f\x8b\x08" + valid,
        "half of a surrogate pair": valid.replace(b"e", b"\\ud800", 1),
        "quotes only": b'"' * 1001,
        "names twice": valid.replace(b"{", b'{"a": 1, "a": 2, ', 1),
        "first line only": valid.split(b"\n")[0] + b"\n",
        "without its first line": b"\n".join(valid.split(b"\n")[1:]),
        "blank first line": b"\n" + valid,
        **{
            f"cut to {share} %": valid[: len(valid) * share // 100] for share in (1, 10, 50, 90, 99)
        },
        **{f"every number {_shown(text)}": _numbers_as(text, valid) for text in STRANGE},
    }


def _shown(text: bytes) -> str:
    return f"{text[:9].decode()} of {len(text)} bytes" if len(text) > 9 else text.decode()


def _numbers_as(text: bytes, valid: bytes) -> bytes:
    return NUMBER.sub(lambda _: text, valid)


def mutated(valid: bytes, seed: int) -> bytes:
    """One to four random damages."""
    draw = random.Random(seed)
    content = bytearray(valid)
    for _ in range(draw.randint(1, 4)):
        content = _once(content, draw)
    return bytes(content)


def _once(content: bytearray, draw: random.Random) -> bytearray:
    place = draw.randrange(len(content) + 1)
    other = min(len(content), place + draw.choice((1, 2, 8, 40)))
    kind = draw.randrange(7)
    if kind == 0:
        return content[:place]
    if kind == 1:
        return content[:place] + content[other:]
    if kind == 2:
        return content[:place] + content[place:other] * draw.choice((2, 3, 200)) + content[other:]
    if kind == 3:
        return content[:place] + draw.choice(INSERTED) + content[place:]
    if kind == 4:
        return content[:place] + draw.randbytes(other - place) + content[other:]
    if kind == 5:
        numbers = list(NUMBER.finditer(bytes(content)))
        if numbers:
            found = draw.choice(numbers)
            return content[: found.start()] + draw.choice(STRANGE) + content[found.end() :]
        return content
    names = list(re.finditer(rb'"\w+"', bytes(content)))
    if names:
        found, by = draw.choice(names), draw.choice(names)
        return content[: found.start()] + by.group() + content[found.end() :]
    return content
