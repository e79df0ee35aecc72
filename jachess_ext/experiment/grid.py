"""`Grid`: what a comparison runs, from the command line or a JSON file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..evaluation.judge import Conditions
from ..json_data import BadJSON, check, read_json
from ..tasks.examples import DataError
from ..tasks.files import Columns


@dataclass(frozen=True)
class Recipe:
    """How every method fine-tunes, the same for all.

    `lr` None: 2e-5, with LoRA 1e-4 (the paper's). `warmup`: share of the steps. `scheduler` is
    transformers' name of the learning rate's course, which passes of mode unlab do not take part
    in unless the method says ``unlab_schedule=follow``.
    """

    epochs: float = 5.0
    batch_size: int = 16
    lr: float | None = None
    weight_decay: float = 0.0
    warmup: float = 0.1
    scheduler: str = "linear"
    max_length: int = 128
    lora: bool = False
    bf16: bool = False
    gradient_accumulation: int = 1
    gradient_checkpointing: bool = False
    torch_compile: bool = False

    @property
    def learning_rate(self) -> float:
        """`lr`, or the paper's."""
        return self.lr if self.lr is not None else (1e-4 if self.lora else 2e-5)

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "max_length", "gradient_accumulation"):
            if not getattr(self, name) > 0:
                raise DataError(f"{name} is {getattr(self, name)}; expected more than 0")
        if self.lr is not None and not 0 < self.lr < float("inf"):
            raise DataError(f"lr is {self.lr}; expected a number above 0")
        if not 0 <= self.weight_decay < float("inf"):
            raise DataError(f"weight_decay is {self.weight_decay}; expected a number from 0 up")
        if not 0 <= self.warmup < 1:
            raise DataError(f"warmup is {self.warmup}; expected a share of the steps, below 1")


@dataclass(frozen=True)
class Tuning:
    """How a method's knob (`Method.knob`) is chosen, on training rows alone.

    For each task and method, models trained on the rest of the training rows are judged on the
    `validation` share of them; the value with the best mean score over `seeds` wins (of equals, the
    better calibrated, then the smaller). Without values for a knob it stays as the method has it.

    `strength` is of the methods that penalise derivatives (jacobian, cross-holder, jachess). The
    strengths of l2 and r3f are on scales of their own: where `strength` has values, they are tried
    at `factors` of their default. `methods` gives values to try for one method in place of all
    these, by its text in the grid or its name with the mode ("l2", "jachess-train").
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
        named = [(f"values for {method!r}", tried) for method, tried in self.methods.items()]
        for name, needed in [("seeds", self.seeds), ("factors", self.factors), *named]:
            if not needed:
                raise DataError(f"tuning has no {name}; expected at least one")
        given = [("strength", self.strength), ("unlab_lr_ratio", self.unlab_lr_ratio)]
        for name, values in [("seeds", self.seeds), ("factors", self.factors), *given, *named]:
            if len(set(values)) != len(values):
                raise DataError(f"tuning's {name} are {list(values)}; expected each of them once")


@dataclass(frozen=True)
class Grid:
    """Methods × tasks × seeds of one model.

    `tasks` are specifications of `tasks.spec.load_task`; `shift` maps a task's name to those of
    tasks whose dev rows its models are judged on as well; `methods` are texts for
    `parse_method`. Sizes None: all rows; `shift_size` is of the dev rows of targets.
    `fewer`: whether a task with fewer training rows than `train_size` is taken with all it has.

    `resample`: whether each seed draws training and unlabelled rows of its own; the dev rows are
    the same for all. `label_noise`: share of the training labels that are another class, drawn by
    the seed. `validation`: share of the dev rows on which temperatures are fitted and epochs
    chosen, and which are judged on in no way; 0: no temperatures. `curve`: whole epochs after which
    the models of `curve_methods` are judged as well.
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
    resample: bool = False
    label_noise: float = 0.0
    validation: float = 0.0
    curve: tuple[int, ...] = ()
    curve_methods: tuple[str, ...] = ("none",)
    columns: Columns = field(default_factory=Columns)
    recipe: Recipe = field(default_factory=Recipe)
    tuning: Tuning = field(default_factory=Tuning)
    conditions: Conditions = field(default_factory=Conditions)

    def __post_init__(self) -> None:
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
        if self.curve and (min(self.curve) < 1 or len(set(self.curve)) != len(self.curve)):
            raise DataError(f"curve is {list(self.curve)}; expected whole epochs, each once")
        if self.curve and not self.validation:
            raise DataError("a curve needs validation rows to choose its epoch on; set validation")
        for name, seeds in (
            ("seeds", self.seeds),
            ("data_seed", (self.data_seed,)),
            ("tuning's seeds", self.tuning.seeds),
        ):
            if min(seeds) < 0 or max(seeds) >= 2**32:
                raise DataError(f"{name} is {list(seeds)}; expected numbers from 0 to 2^32 - 1")


_PARTS = {"columns": Columns, "recipe": Recipe, "tuning": Tuning, "conditions": Conditions}


def read_grid(path: Path) -> dict[str, Any]:
    """The fields of a grid file: JSON with the names of `Grid`'s fields.

    Raises:
        DataError: it cannot be read or is no JSON object.
    """
    try:
        content = read_json(path)
    except BadJSON as error:
        raise DataError(f"{path} {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} is not a JSON object with the names of settings")
    return content


def make_grid(content: Mapping[str, Any]) -> Grid:
    """A `Grid` from plain values; lists become tuples, objects the grid's parts.

    Raises:
        DataError: a name that is not a setting, one that is missing, or a bad value.
    """
    content = dict(content)
    for name, kind in _PARTS.items():
        if name in content:
            content[name] = _part(name, kind, content[name])
    if isinstance(content.get("shift"), Mapping):
        content["shift"] = {
            task: (targets,) if isinstance(targets, str) else targets
            for task, targets in content["shift"].items()
        }
    missing = [name for name in ("model", "tasks", "methods") if not content.get(name)]
    if missing:
        raise DataError(f"the grid has no {missing[0]}; it needs model, tasks and methods")
    return _part("the grid", Grid, content)


def _part(name: str, kind: Any, content: Any) -> Any:
    if isinstance(content, kind):
        return content
    try:
        check(content, kind, name)
        return kind(**{name: _frozen(value) for name, value in content.items()})
    except ValueError as error:
        raise DataError(str(error)) from error


def _frozen(value: Any) -> Any:
    """Lists as tuples, also within objects."""
    if isinstance(value, dict):
        return {key: _frozen(inner) for key, inner in value.items()}
    return tuple(value) if isinstance(value, list) else value


def quick(grid: Grid) -> Grid:
    """The same at a size that shows that everything runs: one seed, few rows, one epoch."""
    tuning = grid.tuning
    return replace(
        grid,
        fewer=True,
        seeds=grid.seeds[:1],
        train_size=min(grid.train_size or 64, 64),
        unlabelled_size=min(grid.unlabelled_size or 32, 32),
        dev_size=min(grid.dev_size or 64, 64),
        shift_size=min(grid.shift_size or 64, 64),
        curve=(1,) if grid.curve else (),
        recipe=replace(grid.recipe, epochs=1.0, max_length=min(grid.recipe.max_length, 32)),
        tuning=replace(
            tuning,
            strength=tuning.strength[:1],
            factors=tuning.factors[:1],
            unlab_lr_ratio=tuning.unlab_lr_ratio[:1],
            seeds=tuning.seeds[:1],
            methods={method: values[:1] for method, values in tuning.methods.items()},
        ),
    )
