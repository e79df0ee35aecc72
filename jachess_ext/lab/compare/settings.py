"""Settings of a comparison, as plain dataclasses; importing them imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..._io import DataError
from ..workbench.settings import Columns, Recipe

TEXT_NOISE = ("typos", "case", "punctuation", "swaps")


@dataclass(frozen=True)
class Conditions:
    """Conditions under which a model is judged, with the same draws for every model.

    Attributes:
        corruption: shares of tokens replaced by the unknown token, as in the JacHess paper; see
            `corrupt_tokens` for tokenizers whose unknown token is the padding.
        deltas: sizes of the embedding noise, in units of the entries' root mean square.
        texts: changes of the texts: typos, case, punctuation, swaps.
        text_share: share of the words that `texts` changes.
        attack: where the candidates of a word attack come from: a file with a word and its
            synonyms on each line, a folder with WordNet's files, or "embeddings", the nearest rows
            of the model's own embedding table; None: no attack.
        attack_share: the most words of a row that the attack may replace, as a share.
        attack_tries: texts that each of its steps asks the model about.
        attack_rows: rows that it is tried on, at even distances; None: all.
        draws: random corruptions and noises averaged; `texts` has one draw.
        sequences: number of examples that the norms are measured on; 0: no norms.
        layers: whether norms of all layers are measured, not only the logits'.
        batch: examples at a time.
        bf16: whether corrupted and noisy rows are judged under bf16 autocast; clean ones never are.

    Raises:
        ValueError: a setting is out of range; the message names it.
    """

    corruption: tuple[float, ...] = (0.05, 0.1, 0.15, 0.2)
    deltas: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0)
    texts: tuple[str, ...] = ()
    text_share: float = 0.2
    attack: str | None = None
    attack_share: float = 0.2
    attack_tries: int = 8
    attack_rows: int | None = None
    draws: int = 1
    sequences: int = 32
    layers: bool = True
    batch: int = 64
    bf16: bool = False

    def __post_init__(self) -> None:
        for share in self.corruption:
            if not 0 <= share <= 1:
                raise ValueError(f"corruption has {share}; expected shares from 0 to 1")
        for delta in self.deltas:
            if not 0 <= delta < float("inf"):
                raise ValueError(f"deltas has {delta}; expected finite numbers from 0 up")
        for noise in self.texts:
            if noise not in TEXT_NOISE:
                raise ValueError(f"texts has {noise!r}; expected some of {', '.join(TEXT_NOISE)}")
        if not 0 <= self.text_share <= 1:
            raise ValueError(f"text_share is {self.text_share}; expected a share from 0 to 1")
        if not 0 < self.attack_share <= 1:
            raise ValueError(
                f"attack_share is {self.attack_share}; expected a share above 0, up to 1"
            )
        if self.attack_rows is not None and self.attack_rows < 1:
            raise ValueError(f"attack_rows is {self.attack_rows}; expected a number from 1 up")
        for name, least in (("draws", 1), ("sequences", 0), ("batch", 1), ("attack_tries", 1)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; expected a number from {least} up"
                )

    @property
    def bare(self) -> Conditions:
        """These conditions reduced to the clean rows."""
        return replace(self, corruption=(), deltas=(), texts=(), attack=None, sequences=0)

    @property
    def named(self) -> dict[str, Any]:
        """All that figures depend on, by name: without an attack nothing of one."""
        return {
            name: value
            for name, value in asdict(self).items()
            if self.attack is not None or not name.startswith("attack")
        }


@dataclass(frozen=True)
class Tuning:
    """Values to try for a method's knob (`Method.knob`), from which training rows choose.

    For each task and method, models trained on the rest of the training rows are judged on the
    `validation` share of them.  The value with the best mean score over `seeds` wins; of equal ones
    the better calibrated, then the smaller.  A knob without values stays as the method has it.

    Attributes:
        strength: values for methods that penalise derivatives (jacobian, cross-holder, jachess).
        factors: multiples of the default strength to try for the other methods if `strength` is
            given: the strengths of l2 and r3f have scales of their own.
        unlab_lr_ratio: values for mode unlab.
        validation: share of the training rows to judge on.
        seeds: seeds of the tuning runs.
        methods: values that replace all these for a method, by its text in the grid or its name
            with the mode ("l2", "jachess-train").
    """

    strength: tuple[float, ...] = ()
    factors: tuple[float, ...] = (0.1, 1.0, 10.0)
    unlab_lr_ratio: tuple[float, ...] = ()
    validation: float = 0.25
    seeds: tuple[int, ...] = (1000,)
    methods: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 < self.validation < 1:
            raise DataError(f"validation is {self.validation}; expected a share between 0 and 1")
        values_by_method = {
            f"values for {method!r}": tried for method, tried in self.methods.items()
        }
        needed = {"seeds": self.seeds, "factors": self.factors, **values_by_method}
        for name, values in needed.items():
            if not values:
                raise DataError(f"tuning has no {name}; expected at least one")
        optional = {"strength": self.strength, "unlab_lr_ratio": self.unlab_lr_ratio}
        for name, values in {**needed, **optional}.items():
            if len(set(values)) != len(values):
                raise DataError(f"tuning's {name} are {list(values)}; expected each of them once")


@dataclass(frozen=True)
class Grid:
    """Methods × tasks × seeds of one model; `from_json(read_json(path), Grid, ...)` reads a file.

    Attributes:
        model: path or hub id of the model.
        tasks: glue/cola, hub:owner/name, a folder or train.csv:dev.csv, perhaps with name= before
            it (`load_task`).
        methods: none, sam,rho=0.1, jachess-unlab,weights=norm and so on (`parse_method`).
        seeds: seeds of the final runs.
        shift: by a task's name, tasks whose dev rows its models are judged on as well.
        train_size: training rows; None: all.
        unlabelled_size: unlabelled rows; None: all.
        dev_size: rows to judge on; None: all.
        shift_size: rows of each task of `shift`; None: all.
        fewer: whether a task with fewer training rows than `train_size` is used with all its rows.
        data_seed: draws the rows.
        label_noise: share of the training labels changed to another class, drawn by the seed.
        validation: share of the dev rows that are set aside to fit temperatures and to find the
            plain model's best epoch; 0: neither.
        columns: columns of the tasks' files.
        recipe: how every method fine-tunes.
        tuning: how strengths are chosen.
        conditions: how models are judged.

    Example:
        >>> Grid(model="gpt2", tasks=("glue/cola",), methods=("none", "sam"), seeds=(0, 0))
        Traceback (most recent call last):
        jachess_ext._io.DataError: seeds is [0, 0]; expected some, each of them once
    """

    model: str
    tasks: tuple[str, ...]
    methods: tuple[str, ...]
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    shift: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    train_size: int | None = None
    unlabelled_size: int | None = 1000
    dev_size: int | None = None
    shift_size: int | None = None
    fewer: bool = False
    data_seed: int = 0
    label_noise: float = 0.0
    validation: float = 0.0
    columns: Columns = field(default_factory=Columns)
    recipe: Recipe = field(default_factory=Recipe)
    tuning: Tuning = field(default_factory=Tuning)
    conditions: Conditions = field(default_factory=Conditions)

    def __post_init__(self) -> None:
        if not self.model:
            raise DataError("the grid has no model; it needs model, tasks and methods")
        for name in ("tasks", "methods", "seeds"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise DataError(f"{name} is {list(values)}; expected some, each of them once")
        for name in ("train_size", "unlabelled_size", "dev_size", "shift_size"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise DataError(f"{name} is {getattr(self, name)}; expected a number from 1 up")
        for name in ("label_noise", "validation"):
            if not 0 <= getattr(self, name) < 1:
                raise DataError(f"{name} is {getattr(self, name)}; expected a share below 1")
        named_seeds = {"seeds": self.seeds, "data_seed": (self.data_seed,)}
        for name, seeds in {**named_seeds, "tuning's seeds": self.tuning.seeds}.items():
            if min(seeds) < 0 or max(seeds) >= 2**32:
                raise DataError(f"{name} is {list(seeds)}; expected numbers from 0 to 2^32 - 1")
