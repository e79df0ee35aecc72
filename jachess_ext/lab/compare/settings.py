"""Settings of a comparison, as plain dataclasses; importing them imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from ..._io import DataError
from ..workbench.settings import Columns, Recipe, check

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
        """These conditions without noise, attack and norms."""
        return replace(self, corruption=(), deltas=(), texts=(), attack=None, sequences=0)

    @property
    def identity(self) -> dict[str, object]:
        """The settings that figures depend on: those of the attack only if there is one."""
        # part of a run's name: runs from before there were attacks keep theirs
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
        check(self, "a share between 0 and 1", lambda x: 0 < x < 1, "validation")
        by_method = {f"values for {text!r}": values for text, values in self.methods.items()}
        for name, values in {"seeds": self.seeds, "factors": self.factors, **by_method}.items():
            if not values:
                raise DataError(f"tuning has no {name}; expected at least one")


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
