"""What the benchmark scripts share: command line, models, timing, memory and result files."""

from __future__ import annotations

import argparse
import gc
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

import jachess_ext as jx
from jachess_ext._io import write_text

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
Batch = dict[str, Tensor]
Step = Callable[[], object]


# Models and batches -----------------------------------------------------------------------------

VOCABULARY = 4_000
"""Small on purpose: the embedding table and its gradient are no part of any question here."""


@dataclass(frozen=True)
class Shape:
    """A model family with its sizes, and the batch it is timed on (B sequences of T tokens)."""

    family: str
    layers: int
    width: int
    heads: int
    inner: int
    batch: int
    tokens: int
    key_value_heads: int = 0

    @property
    def name(self) -> str:
        return f"{self.family}-{self.layers}x{self.width}-B{self.batch}-T{self.tokens}"


SHAPES = {
    "tiny": Shape("bert", 2, 64, 4, 128, 2, 8),
    "encoder4-T16": Shape("bert", 4, 64, 4, 256, 2, 16),
    "encoder6-T32": Shape("bert", 6, 384, 12, 1536, 8, 32),
    "encoder6-T128": Shape("bert", 6, 384, 12, 1536, 8, 128),
    "encoder12-T32": Shape("bert", 12, 768, 12, 3072, 4, 32),
    "encoder12-T128": Shape("bert", 12, 768, 12, 3072, 4, 128),
    "encoder24-T128": Shape("bert", 24, 1024, 16, 4096, 4, 128),
    "llama6-T128": Shape("llama", 6, 512, 8, 1408, 8, 128, key_value_heads=2),
    "llama-tiny": Shape("llama", 2, 64, 4, 128, 2, 8, key_value_heads=2),
    "opt-tiny": Shape("opt", 2, 64, 4, 128, 2, 8),
    "opt12-T128": Shape("opt", 12, 768, 12, 3072, 4, 128),
    "opt24-T128": Shape("opt", 24, 2048, 32, 8192, 8, 128),
    **{f"attention-T{t}": Shape("attention", 1, 512, 8, 0, 1, t) for t in (128, 1024, 2048)},
    "dit4-T256": Shape("dit", 4, 192, 3, 768, 2, 256),
    "dit6-T256": Shape("dit", 6, 384, 6, 1536, 2, 256),
}


def build_model(
    shape: Shape,
    *,
    attention: str = "sdpa",
    dropout: float = 0.0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> nn.Module:
    """Return a sequence classifier with random weights, in train mode.

    Args:
        attention: "sdpa" or "eager".
        dropout: of every kind; 0 by default, since CPU sdpa leaves its fused kernel for any other
            value, which would slow the plain step and flatter ours.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification

    torch.manual_seed(seed)
    inner = "ffn_dim" if shape.family == "opt" else "intermediate_size"
    own: dict[str, dict[str, Any]] = {
        "bert": {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout},
        "llama": {"num_key_value_heads": shape.key_value_heads, "attention_dropout": dropout},
        "opt": {
            "word_embed_proj_dim": shape.width,
            "dropout": dropout,
            "attention_dropout": dropout,
        },
    }
    config = AutoConfig.for_model(
        shape.family,
        vocab_size=VOCABULARY,
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        max_position_embeddings=max(512, shape.tokens),
        num_labels=2,
        pad_token_id=0,
        **{inner: shape.inner},
        **own[shape.family],
    )
    config._attn_implementation = attention
    model = AutoModelForSequenceClassification.from_config(config)
    return model.to(device=device, dtype=dtype).train()


def make_batch(
    shape: Shape, *, labels: bool, device: torch.device | str = "cpu", seed: int = 0
) -> Batch:
    """Return random token ids ``[B, T]`` without padding, a full mask, and labels ``[B]``."""
    generator = torch.Generator().manual_seed(seed)
    size = (shape.batch, shape.tokens)
    batch = {
        "input_ids": torch.randint(1, VOCABULARY, size, generator=generator),
        "attention_mask": torch.ones(size, dtype=torch.long),
    }
    if labels:
        batch["labels"] = torch.randint(0, 2, (shape.batch,), generator=generator)
    return {name: value.to(device) for name, value in batch.items()}


SENTENCES = (
    "The ferry to the island leaves at seven, unless the wind turns north.",
    "He measured the same table three times and wrote down three lengths.",
    "A regulariser that nobody can afford to compute regularises nothing.",
    "Most of the seeds we planted in March came up after the second rain.",
    "Her answer was short, polite and, as it turned out, completely wrong.",
    "The museum closes early on Mondays but the garden behind it does not.",
    "Prices fell for two weeks before anyone in the village noticed.",
    "Nobody reads the manual until the second screw is left over.",
)
ENCODER = {
    "vocab_size": 30_522,
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
}
"""Sizes of the 22M encoder (all-MiniLM-L6-v2): what random weights imitate."""
_SMALL = ENCODER | {"vocab_size": 2_000, "hidden_size": 48, "num_hidden_layers": 2}


def load_classifier(
    path: Path | None, rows: int, tokens: int, device: torch.device, *, small: bool = False
) -> tuple[nn.Module, Batch]:
    """Load an encoder with a new 2-class head (eval mode, fp32), and rows of ``tokens`` tokens.

    Args:
        path: its folder; None: a model of the same sizes with random weights, on random ids.
        small: random weights of few and narrow layers instead, to try a script out.

    Raises:
        FileNotFoundError: there is no model in ``path``.
    """
    from transformers import AutoModelForSequenceClassification, BertConfig, logging

    torch.manual_seed(0)
    if path is None:
        sizes = _SMALL if small else ENCODER
        config = BertConfig(**sizes, num_labels=2)
        model = AutoModelForSequenceClassification.from_config(config)
        ids = torch.randint(1000, sizes["vocab_size"], (rows, tokens))
    else:
        tokenizer = _load_tokenizer(path)
        logging.set_verbosity_error()  # that the head is new is no warning here
        logging.disable_progress_bar()
        model = AutoModelForSequenceClassification.from_pretrained(
            path, num_labels=2, local_files_only=True
        )
        draw = random.Random(0)
        texts = [" ".join(draw.choices(SENTENCES, k=-(-tokens // 8))) for _ in range(rows)]
        encoded = tokenizer(texts, truncation=True, max_length=tokens, return_tensors="pt")
        ids = encoded["input_ids"]
        assert ids.shape == (rows, tokens)
    batch = {"input_ids": ids.to(device), "attention_mask": torch.ones_like(ids).to(device)}
    return model.to(device).eval(), batch


def load_encoder(path: Path, rows: int, device: torch.device) -> tuple[nn.Module, Batch]:
    """Load the model in ``path`` (eval mode, fp32) and its tokens for ``rows`` sentences, padded.

    Raises:
        FileNotFoundError: there is no model in ``path``.
    """
    from transformers import AutoModel

    tokenizer = _load_tokenizer(path)
    model = AutoModel.from_pretrained(path, local_files_only=True).to(device).eval()
    texts = [SENTENCES[number % len(SENTENCES)] for number in range(rows)]
    encoded = tokenizer(texts, padding=True, return_tensors="pt")
    names = ("input_ids", "attention_mask")
    return model, {name: encoded[name].to(device) for name in names}


def _load_tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    if not (path / "config.json").exists():
        raise FileNotFoundError(
            f"{path} holds no config.json; expected a folder as save_pretrained writes it"
        )
    return AutoTokenizer.from_pretrained(path, local_files_only=True)


# The training steps that are compared -----------------------------------------------------------


def plain_step(model: nn.Module, batch: Batch) -> Step:
    """Return forward and backward of the task loss; no optimiser step, as in all the others."""

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(**batch).loss.backward()

    return step


def regulariser(model: nn.Module, **settings: Any) -> jx.JacHess:
    """Return JacHess with uniform λ, two directions and all dimensions unless said otherwise."""
    given: dict[str, Any] = {"weights": "uniform", "directions": 2, "dimensions": "all"}
    return jx.JacHess(model, **(given | settings))


def penalty_step(model: nn.Module, batch: Batch, **settings: Any) -> Step:
    """Return unlab mode: R alone, forward and backward, on a batch without labels."""
    penalty = regulariser(model, **settings)
    unlabelled = {name: value for name, value in batch.items() if name != "labels"}

    def step() -> None:
        model.zero_grad(set_to_none=True)
        penalty(unlabelled).loss.backward()

    return step


def train_step(model: nn.Module, batch: Batch, **settings: Any) -> Step:
    """Return train mode: task loss + R from one forward, and its backward."""
    penalty = regulariser(model, **settings)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        penalty(batch).total.backward()

    return step


# Timing -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """20th, 50th and 80th percentile of a figure over the rounds."""

    p20: float
    p50: float
    p80: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        numbers = torch.tensor(values, dtype=torch.float64)
        return cls(*torch.quantile(numbers, torch.tensor([0.2, 0.5, 0.8]).double()).tolist())


@dataclass(frozen=True)
class Timings:
    """Seconds per round of every step, in the order the rounds ran."""

    seconds: dict[str, list[float]]

    def milliseconds(self, name: str) -> Spread:
        return Spread.of([1e3 * value for value in self.seconds[name]])

    def ratio(self, name: str, baseline: str) -> float:
        """Return the ratio of the medians."""
        return self.milliseconds(name).p50 / self.milliseconds(baseline).p50


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interleaved(
    steps: Mapping[str, Step],
    *,
    repeats: int,
    device: torch.device,
    warmup: int = 2,
    in_a_row: int = 1,
) -> Timings:
    """Time every step once per round, so that a slow spell of the machine meets all of them, in an
    order drawn anew, so that none always finds what the same other one left in the caches.

    Args:
        steps: what to time, by name.
        repeats: rounds that count.
        warmup: rounds before them.
        in_a_row: how often each runs in a round, of which the mean counts: 1 is a step that finds
            others' data in the caches, more is a loop of such steps.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    enabled = gc.isenabled()
    gc.disable()
    try:
        for number in range(warmup + repeats):
            for name in random.Random(number).sample(list(steps), len(steps)):
                step = steps[name]
                gc.collect()
                synchronize(device)
                start = time.perf_counter()
                for _ in range(in_a_row):
                    step()
                synchronize(device)
                if number >= warmup:
                    seconds[name].append((time.perf_counter() - start) / in_a_row)
    finally:
        if enabled:
            gc.enable()
    return Timings(seconds)


# Memory -----------------------------------------------------------------------------------------

_MEGABYTE = 2**20


def peak_megabytes(step: Step, device: torch.device) -> float | None:
    """Return the peak of allocated bytes on a GPU while ``step`` runs, in MiB.

    None on a CPU: there a process that has run other steps has their pages in its heap, so that
    `benchmarks.memory` gives every step a process of its own.
    """
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.reset_peak_memory_stats(device)
    step()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) / _MEGABYTE


def peak_above(before: float, step: Step, device: torch.device) -> float:
    """Return `peak_megabytes`, on a CPU the resident set's peak, less ``before``."""
    peak = peak_megabytes(step, device)
    if peak is None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
        step()
        peak = status_megabytes("VmHWM")
    return peak - before


def held_megabytes(device: torch.device) -> float:
    """Return the MiB allocated on a GPU now; on a CPU, resident."""
    if device.type == "cuda":
        gc.collect()  # as before a peak is taken
        return torch.cuda.memory_allocated(device) / _MEGABYTE
    return status_megabytes("VmRSS")


def measure_apart(module: str, *arguments: str) -> float:
    """Return the number that ``python -m module arguments`` prints last, in its own process.

    Raises:
        RuntimeError: the process failed; the message ends with what it wrote.
    """
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:])} failed:\n{done.stderr[-2000:]}")
    return float(done.stdout.split()[-1])


def status_megabytes(field: str) -> float:
    """Return a field of /proc/self/status in MiB: VmRSS, resident now; VmHWM, its peak so far.

    Raises:
        RuntimeError: the system has no such file or field (it is not Linux).
    """
    path = Path("/proc/self/status")
    lines = path.read_text().splitlines() if path.exists() else []
    for line in lines:
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"{path} tells no {field}; memory is measured on Linux or on a GPU only")


# The command line -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """Parsed arguments; ``quick`` runs are for trying a script out, not for figures.

    Attributes:
        shapes: names of those given; None: the default of what is measured.
        repeats: rounds given; None: the default of what is measured.
        results: folder of the CSVs; None: none are written.
        extra: all that was parsed, a script's own options among it.
    """

    device: torch.device
    dtype: torch.dtype
    shapes: list[str] | None
    repeats: int | None
    dropout: float
    quick: bool
    results: Path | None
    extra: argparse.Namespace

    @property
    def place(self) -> dict[str, Any]:
        """Where and how `build_model` is to build."""
        return {"device": self.device, "dtype": self.dtype, "dropout": self.dropout}

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def shapes_or(self, default: Sequence[str], quick: Sequence[str] = ("tiny",)) -> list[Shape]:
        """Return the shapes given, or the defaults."""
        return [SHAPES[name] for name in self.shapes or (quick if self.quick else default)]

    def rounds(self, default: int = 9) -> int:
        """Return the rounds given, or the default."""
        return self.repeats or (3 if self.quick else default)


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the shared options; a script adds its own before `parse`."""
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--device", default="cpu", help="cpu or cuda")
    result.add_argument("--dtype", default="float32", choices=sorted(DTYPES))
    result.add_argument("--shapes", nargs="+", choices=sorted(SHAPES))
    result.add_argument("--repeats", type=int, help="rounds that count; quick 3")
    result.add_argument("--threads", type=int, default=2, help="CPU threads")
    result.add_argument("--dropout", type=float, default=0.0)
    result.add_argument("--quick", action="store_true", help="small and few; writes no CSV")
    result.add_argument("--results", type=Path, help=f"folder of the CSVs; default {RESULTS}")
    return result


def parse(arguments: argparse.ArgumentParser, argv: Sequence[str] | None) -> Options:
    """Read the command line and set torch's threads."""
    given = arguments.parse_args(argv)
    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        arguments.error("--device cuda was asked for, but torch sees no GPU; use --device cpu")
    if given.repeats is not None and given.repeats < 1:
        arguments.error(f"--repeats is {given.repeats}; expected 1 or more")
    torch.set_num_threads(given.threads)
    return Options(
        device=device,
        dtype=DTYPES[given.dtype],
        shapes=given.shapes,
        repeats=given.repeats,
        dropout=given.dropout,
        quick=given.quick,
        results=given.results or (None if given.quick else RESULTS),
        extra=given,
    )


# Result files -----------------------------------------------------------------------------------


@dataclass
class Row:
    """A measured figure beside its baseline.

    Attributes:
        figure: what was measured, for example "JacHess step".
        unit: of p20, p50, p80 and baseline_p50.
        ratio: figure over baseline, or the other way round where ``target`` starts with "≥"
            (a speed-up); both from one run.
        peak_mb: peak memory of the step in MiB, where the timing run can tell (on a GPU).
        floor_ratio: figure over the matrix products' own time, where that was measured.
        target: what we ask of the ratio on the CPU; empty where nothing.
    """

    question: str
    shape: str
    dtype: str
    figure: str
    p20: float
    p50: float
    p80: float
    baseline: str
    baseline_p50: float
    ratio: float
    unit: str = "ms"
    floor_ratio: float | None = None
    peak_mb: float | None = None
    target: str = ""
    note: str = ""
    date: str = ""
    commit: str = ""
    device: str = ""
    torch: str = ""
    threads: int = 0


def make_row(options: Options, spread: Spread, **columns: Any) -> Row:
    """Return a row of a spread; the other columns by name."""
    return Row(dtype=options.dtype_name, **asdict(spread), **columns)


def compare_times(
    options: Options, times: Timings, ours: str, theirs: str, *, speed_up: bool = False, **rest: Any
) -> Row:
    """Return the row of two steps that were timed in turn.

    Args:
        speed_up: whether the ratio is theirs over ours, and not ours over theirs.
        rest: question, shape, figure, baseline and further columns.
    """
    ratio = times.ratio(theirs, ours) if speed_up else times.ratio(ours, theirs)
    median = times.milliseconds(theirs).p50
    return make_row(options, times.milliseconds(ours), baseline_p50=median, ratio=ratio, **rest)


def finish(rows: list[Row], name: str, options: Options) -> list[Row]:
    """Append the rows to the CSV ``name`` (not in a quick run without --results), and print."""
    if options.results is not None:
        append_rows(rows, options.results / f"{name}.csv", options.device)
    print_table(rows)
    return rows


def append_rows(rows: list[Row], path: Path, device: torch.device) -> None:
    """Append rows to a CSV file in one write, with the run's circumstances.

    Raises:
        ValueError: the file has other columns: move it away first.
    """
    header = [field.name for field in fields(Row)]
    old = path.exists() and path.stat().st_size > 0
    if old and path.read_text().splitlines()[0].split(",") != header:
        raise ValueError(f"{path} has columns other than {header}; move it away and run again")
    stamp = {
        **stamped(),
        "device": device_name(device),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    frame = pd.DataFrame([asdict(row) | stamp for row in rows])
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(frame.to_csv(index=False, header=not old, float_format="%.5g"))


def write_frame(frame: pd.DataFrame, path: Path, digits: int = 5) -> None:
    """Write a table as the whole content of a CSV file."""
    write_text(path, frame.to_csv(index=False, float_format=f"%.{digits}g"))


def markdown(frame: pd.DataFrame) -> str:
    """Return a table of text as Markdown."""
    lines = [list(frame.columns), ["---"] * frame.shape[1], *frame.to_numpy().tolist()]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def stamped() -> dict[str, str]:
    """Return the columns that say when and with what code a row was measured."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
    }


def commit() -> str:
    """Return the checkout's short hash, with "+" where tracked package files differ from it.

    A checkout without a history, as it travels to a GPU, has that of $JACHESS_COMMIT.
    """
    try:
        head = git("rev-parse", "--short=10", "HEAD")
        changed = git("status", "--porcelain", "-uno", "--", "jachess_ext", "csrc", "benchmarks")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("JACHESS_COMMIT", "")[:10] or "unknown"
    lines = [line for line in changed.splitlines() if "benchmarks/results" not in line]
    return head + ("+" if lines else "")


def git(*arguments: str) -> str:
    """Return what a git command prints in the checkout.

    Raises:
        OSError, subprocess.CalledProcessError: there is no git, or the command failed.
    """
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or the processor's model name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def print_table(rows: Sequence[Row]) -> None:
    """Print the rows as aligned columns, the ratio beside what it should reach."""
    columns = ["shape", "figure", "p20", "p50", "p80", "unit", "baseline", "baseline_p50", "ratio"]
    frame = pd.DataFrame([asdict(row) for row in rows], columns=[*columns, "target", "floor_ratio"])
    frame["floor_ratio"] = frame.floor_ratio.astype(float)  # None: not measured
    print(frame.to_string(index=False, float_format="{:.4g}".format, na_rep=""))
