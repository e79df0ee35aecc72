"""Settings of a comparison, as plain dataclasses; this module must not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from ..._io import DataError
from ..workbench.settings import Columns, Recipe, check

TEXT_NOISE = ("typos", "case", "punctuation", "swaps")
"""Kinds of changes of texts, see `noise.add_text_noise`."""


@dataclass(frozen=True)
class Conditions:
    """Conditions under which models are evaluated, with the same random draws for every model.

    Attributes:
        corruption: shares of tokens replaced by the unknown token, as in the JacHess paper; see
            `corrupt_tokens` for tokenizers whose unknown token is the padding.
        deltas: standard deviations δ of the noise on the embeddings, in units of the root mean
            square entry of the embedding table.
        texts: kinds of changes of the texts, of `TEXT_NOISE`.
        text_share: share of the words that `texts` changes.
        attack: source of the candidates of a word attack: a file with a word and its synonyms on
            each line, a folder with WordNet's files, or "embeddings" for the nearest rows of the
            model's own embedding table; None for no attack.
        attack_share: largest share of the words of a row that the attack may replace.
        attack_tries: number of texts that the model evaluates in each step of the attack.
        attack_rows: number of rows attacked, evenly spaced; None for all.
        draws: number of random corruptions and noises averaged; `texts` has one draw.
        sequences: number of examples that norms of derivatives are measured on; 0 for no norms.
        layers: whether norms of all layers are measured, rather than of the logits only.
        batch: number of examples per batch.
        bf16: whether the evaluation under corruption and noise uses bf16 autocast; that of the
            unchanged rows never does.

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
        check(self, "shares from 0 to 1", lambda x: 0 <= x <= 1, "corruption")
        check(self, "a share from 0 to 1", lambda x: 0 <= x <= 1, "text_share")
        check(self, "finite numbers from 0 up", lambda x: 0 <= x < float("inf"), "deltas")
        check(self, "a share above 0, up to 1", lambda x: 0 < x <= 1, "attack_share")
        counts = ("attack_rows", "draws", "batch", "attack_tries")
        check(self, "a number from 1 up", lambda n: n >= 1, *counts)
        check(self, "a number from 0 up", lambda n: n >= 0, "sequences")
        for noise in self.texts:
            if noise not in TEXT_NOISE:
                raise ValueError(f"texts has {noise!r}; expected some of {', '.join(TEXT_NOISE)}")

    @property
    def clean_only(self) -> Conditions:
        """The same conditions without corruption, noise, attack and norms."""
        return replace(self, corruption=(), deltas=(), texts=(), attack=None, sequences=0)

    @property
    def identity(self) -> dict[str, object]:
        """The settings that the figures depend on, for the digest in a run's name."""
        # without an attack, its settings are left out: runs older than attacks keep their names
        return {
            name: value
            for name, value in asdict(self).items()
            if self.attack is not None or not name.startswith("attack")
        }


@dataclass(frozen=True)
class Tuning:
    """Values to try for the hyperparameter of each method (`Method.knob`).

    For each task and method, models are trained on a part of the training rows and evaluated on the
    others.  The value with the best mean score over `seeds` is chosen; among equals, the one with
    the lower Brier score, then the smaller one.  Without values, the method's default is used.

    Attributes:
        strength: values for methods that penalise derivatives (jacobian, cross-holder, jachess).
        factors: multiples of the default strength for the other methods, used if `strength` is not
            empty; their strengths (of l2, r3f) have different scales.
        unlab_lr_ratio: values for mode unlab.
        validation: share of the training rows that the tuning runs are evaluated on.
        seeds: seeds of the tuning runs.
        methods: values for single methods, which replace the values above, by the method's text in
            the grid or its name with the mode ("l2", "jachess-train").
    """

    strength: tuple[float, ...] = ()
    factors: tuple[float, ...] = (0.1, 1.0, 10.0)
    unlab_lr_ratio: tuple[float, ...] = ()
    validation: float = 0.25
    seeds: tuple[int, ...] = (1000,)
    methods: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(self, "a share between 0 and 1", lambda x: 0 < x < 1, "validation")
        by_method = {f"values for {text!r}": values for text, values in self.methods.items()}
        for name, values in {"seeds": self.seeds, "factors": self.factors, **by_method}.items():
            if not values:
                raise DataError(f"tuning has no {name}; expected at least one")


@dataclass(frozen=True)
class Grid:
    """A comparison of methods × tasks × seeds for one model.

    `from_json(read_json(path), Grid, ...)` reads it from a file.

    Attributes:
        model: path or hub id of the model.
        tasks: tasks in the syntax of `load_task`: glue/cola, hub:owner/name, a folder or
            train.csv:dev.csv, optionally after name=.
        methods: methods in the syntax of `parse_method`: none, sam,rho=0.1,
            jachess-unlab,weights=norm and so on.
        seeds: seeds of the final runs.
        shift: name of a task -> other tasks on whose dev rows its models are evaluated as well.
        train_size: number of training rows; None for all.
        unlabelled_size: number of unlabelled rows; None for all.
        dev_size: number of dev rows; None for all.
        shift_size: number of dev rows of each task of `shift`; None for all.
        fewer: whether a task with fewer training rows than `train_size` is used with all its rows;
            False: it is refused.
        data_seed: seed of the random choice of rows.
        label_noise: share of the training labels changed to another class, drawn for each seed.
        validation: share of the dev rows set aside to fit temperatures and to find the best epoch
            of the plain model; 0 for neither.
        columns: names of the columns of the tasks' files.
        recipe: settings of fine-tuning, the same for every method.
        tuning: how hyperparameters of methods are chosen.
        conditions: how models are evaluated.

    Examples:
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
        sizes = ("train_size", "unlabelled_size", "dev_size", "shift_size")
        check(self, "a number from 1 up", lambda n: n >= 1, *sizes)
        check(self, "a share below 1", lambda x: 0 <= x < 1, "label_noise", "validation")
        for settings, names in ((self, ("seeds", "data_seed")), (self.tuning, ("seeds",))):
            check(settings, "numbers from 0 to 2^32 - 1", lambda n: 0 <= n < 2**32, *names)
