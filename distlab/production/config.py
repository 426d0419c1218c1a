"""The configuration of a training run: flat keys, from a YAML file and the command line."""

import re
import textwrap
import warnings
from collections.abc import Container, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from distlab.production.errors import ConfigError
from distlab.production.parallelism import FLAT_SIZES, Parallelism, with_sizes
from distlab.util.text import did_you_mean

Model = Literal["cnn", "resnet18", "resnet50", "vit_s16", "vit_b16", "transformer", "gpt"]
Data = Literal["digits", "mnist", "cifar10", "imagefolder", "synthetic", "text", "tokens"]
Strategy = Literal["ddp", "fsdp", "course"]
Pattern = Literal[
    "auto",
    "native",
    "naive",
    "recursive_doubling",
    "ring",
    "tree",
    "hierarchical",
    "shared_memory",
    "parameter_server",
]
Compression = Literal["none", "top_k", "random_k", "threshold", "int8", "sign", "power_sgd"]
Precision = Literal["fp32", "bf16", "fp16", "fp64"]
SHAPING = (  # keys on which the states in a checkpoint depend
    *("model", "data", "image_size", "layers", "width", "heads", "sequence_length", "vocab_size"),
    *("optimizer", "momentum", "ema_decay", "precision", "strategy", "communication_pattern"),
    *("zero_redundancy", "parallelism", "compression"),
)


class Config(BaseModel):
    """All settings of a training run; durations are in epochs or steps."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False
    )

    # model and data
    model: Model = "resnet18"
    data: Data = "digits"
    data_dir: Path | None = None
    image_size: int = Field(32, ge=8, le=1024)
    progressive_resize: dict[int, int] = {}  # first epoch -> side of training images
    augment: Literal["none", "crop", "crop_flip"] = "crop_flip"
    mixup: float = Field(0.0, ge=0)  # alpha of the Beta distribution; 0: off
    cutmix: float = Field(0.0, ge=0)
    decode: Literal["pillow", "torchvision"] = "pillow"  # torchvision: on the rank's device
    num_workers: int = Field(2, ge=0)  # image-loading processes per rank
    max_bad_images: int = Field(0, ge=0)  # limit per epoch

    # gpt and its data
    layers: int = Field(4, ge=1)
    width: int = Field(64, ge=1)
    heads: int = Field(4, ge=1)
    sequence_length: int = Field(128, ge=1)  # tokens of a text
    vocab_size: int = Field(50304, ge=2)  # of data: tokens; a text's bytes have 256 values
    token_dtype: Literal["uint16", "uint32"] = "uint16"  # in shards without a header

    # length and recipe
    epochs: int = Field(10, ge=1)
    batch_size: int = Field(128, ge=1)  # total number of samples over all ranks
    accumulate: int = Field(1, ge=1)  # micro-batches per rank and step
    optimizer: Literal["sgd", "adamw"] = "sgd"
    lr: float = Field(0.1, gt=0)  # for batches of lr_batch_size, scaled to batch_size
    lr_batch_size: int = Field(256, ge=1)
    warmup_epochs: float = Field(1.0, ge=0)
    schedule: Literal["cosine", "constant"] = "cosine"
    momentum: float = Field(0.9, ge=0, lt=1)
    weight_decay: float = Field(5e-5, ge=0)
    decay_norms: bool = True  # apply weight decay to biases and norms too
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    clip_norm: float = Field(0.0, ge=0)  # 0: off
    ema_decay: float = Field(0.0, ge=0, lt=1)  # 0: off
    seed: int = Field(0, ge=0)

    # speed
    device: Literal["auto", "cpu", "cuda"] = "auto"
    backend: Literal["auto", "gloo", "nccl", "mpi", "sim"] = "auto"
    cluster: str | None = None  # name of a preset, for sim
    precision: Precision = "fp32"
    channels_last: bool = False  # of activations; of weights too, where no strategy cuts them
    compile: bool = False

    # ranks, and how they share the work
    num_gpus: int | Literal["auto"] = "auto"  # processes per node, also on CPUs
    strategy: Strategy = "ddp"
    communication_pattern: Pattern = "auto"  # shared memory on the CPU of one machine, else native
    gradients: Literal["buckets", "per_parameter", "flat"] = "buckets"  # how the course averages
    zero_redundancy: Literal[0, 1, 2, 3] = 0  # 3 sums gradients in ``precision``, but a ResNet's
    parallelism: Parallelism = Parallelism()  # replicas, stages and shards
    sharding_strategy: Literal["auto", "manual"] = "manual"
    compression: Compression = "none"
    compression_ratio: float = Field(0.01, gt=0, le=1)  # fraction sent; power_sgd uses rank 4

    # output
    run_dir: Path = Path("out/run")
    resume: Literal["auto", "never"] = "auto"
    save_every: int = Field(500, ge=1)
    keep: int = Field(3, ge=1)
    async_save: bool = True
    tensorboard: bool = True
    metrics_port: int = Field(0, ge=0, le=65535)  # 0: no metrics page
    metrics_host: str = "127.0.0.1"
    heartbeat_timeout_s: float = Field(300.0, gt=0)
    profile: bool = False  # trace a few extra steps first, for Perfetto

    @model_validator(mode="before")
    @classmethod
    def _reads_other_forms(cls, values: Any) -> Any:
        """Read ``zero_redundancy: true`` as stage 1, and flat keys as sizes of ``parallelism``."""
        if not isinstance(values, Mapping):
            return values
        stage = values.get("zero_redundancy")
        read = {**values, "zero_redundancy": int(stage)} if isinstance(stage, bool) else {**values}
        sizes = {name: read.pop(key) for key, name in FLAT_SIZES.items() if key in read}
        return (
            {**read, "parallelism": with_sizes(read.get("parallelism"), sizes)} if sizes else read
        )

    @field_validator("*", mode="before")
    @classmethod
    def _keeps_truth_apart(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse ``epochs: true``, which pydantic would read as 1."""
        is_switch = cls.model_fields[str(info.field_name)].annotation is bool
        if isinstance(value, bool) and not is_switch:
            raise ValueError("true and false are for switches")
        return value

    @field_validator("data_dir", "run_dir")
    @classmethod
    def _at_home(cls, path: Path | None) -> Path | None:
        return path.expanduser() if path else path

    @model_validator(mode="after")
    def _fits(self) -> "Config":
        """Refuse conflicting keys; the error says what to change."""
        kinds = _of_worlds, _of_spreading, _of_gradients, _of_images, _of_language
        for is_wrong, reason in chain.from_iterable(kind(self) for kind in kinds):
            if is_wrong:
                raise ValueError(reason)
        return self

    @property
    def is_sharded(self) -> bool:
        """True if ranks hold different parts of the model or of the optimizer state."""
        return bool(self.zero_redundancy) or self.splits_model or self.has_servers

    @property
    def splits_model(self) -> bool:
        """True if no rank holds the whole model while it computes."""
        return self.parallelism.pp * self.parallelism.tp > 1

    @property
    def is_half(self) -> bool:
        """True if the forward and the backward pass compute in 16 bits."""
        return self.precision in ("bf16", "fp16")

    @property
    def is_language(self) -> bool:
        """True if the samples are texts, and each token is predicted."""
        return self.model == "gpt"

    @property
    def unit(self) -> str:
        """Name of what is predicted, and counted per second."""
        return "tokens" if self.is_language else "images"

    @property
    def predictions_per_sample(self) -> int:
        """Number of predictions for a sample: 1 for an image, one for each token of a text."""
        return self.sequence_length if self.is_language else 1

    @property
    def has_servers(self) -> bool:
        """True if the first rank is a parameter server."""
        return self.strategy == "course" and self.communication_pattern == "parameter_server"


Conflicts = list[tuple[bool, str]]  # whether keys conflict, and what to do about it


def _of_worlds(c: Config) -> Conflicts:
    """Return conflicts between the keys that say on which ranks the training runs."""
    return [
        (
            c.num_gpus != "auto" and c.num_gpus < 1,
            f"num_gpus: {c.num_gpus} starts nothing: use auto, or 1 or more",
        ),
        (
            c.backend == "nccl" and c.device == "cpu",
            "backend: nccl needs GPUs, and device is cpu: leave one of them out",
        ),
        (
            c.communication_pattern == "shared_memory" and c.backend not in ("auto", "gloo"),
            f"communication_pattern: shared_memory is for gloo, and backend is {c.backend}: leave "
            "one of them out",
        ),
        (
            c.cluster is not None and c.backend != "sim",
            f"cluster: {c.cluster} is simulated: add backend: sim",
        ),
    ]


def _of_spreading(c: Config) -> Conflicts:
    """Return conflicts between the keys that say how ranks share the work."""
    keys = "communication_pattern", "gradients", "zero_redundancy"
    course_keys = [
        f"{name}: {getattr(c, name)}"
        for name in keys
        if getattr(c, name) != Config.model_fields[name].default
    ]
    splits, pattern, sizes = c.splits_model, c.communication_pattern, c.parallelism
    course_keys += [f"parallelism: {sizes}"] if splits else []
    return [
        (
            (pattern not in ("auto", "native", "ring") and (bool(c.zero_redundancy) or splits))
            or (pattern == "ring" and c.zero_redundancy > 1),
            f"communication_pattern: {pattern} is for gradients that are averaged whole by all "
            "ranks: leave it out here; ring also goes with zero_redundancy: 1 and with pipeline "
            "and tensor parallelism",
        ),
        (
            sizes.pp > 1 and (c.accumulate > 1 or c.compile),
            "a pipeline cuts batches by itself and is not compiled: leave accumulate and compile "
            "out",
        ),
        (
            c.gradients != "buckets"
            and (bool(c.zero_redundancy) or c.has_servers or c.compression != "none"),
            f"gradients: {c.gradients} averages gradients after the backward pass: leave it out "
            "with zero_redundancy, parameter_server or compression",
        ),
        (
            c.strategy != "course" and bool(course_keys),
            f"strategy {c.strategy} is torch's own, and {', '.join(course_keys)} asks for the "
            "course's: set strategy: course, or leave these out",
        ),
        (
            sizes.tp > 1 and not (_is_vit(c) or c.is_language),
            f"parallelism {sizes}: tp splits attention and MLPs, and {c.model} has none: use "
            "model: gpt, transformer, vit_s16 or vit_b16",
        ),
        (
            splits and c.zero_redundancy > 1,
            f"zero_redundancy: {c.zero_redundancy} with pipeline or tensor parallelism is not "
            "offered: the stages' gradients must stay whole; set zero_redundancy: 1",
        ),
    ]


def _of_gradients(c: Config) -> Conflicts:
    """Return conflicts with keys for which each rank needs whole gradients or a whole model."""
    plain = not c.is_sharded and c.strategy != "fsdp"
    return [
        (
            bool(c.clip_norm) and (c.splits_model or c.has_servers),
            "clip_norm needs the norm of all gradients, which pipelines, tensor parallelism and a "
            "parameter server hold in parts: leave it out, or use replicas, ZeRO or fsdp",
        ),
        (
            not c.decay_norms and (bool(c.zero_redundancy) or c.has_servers),
            "decay_norms: false needs parameters in their shapes, which ZeRO and a parameter "
            "server lay out flat: leave it out, or use strategy ddp or fsdp",
        ),
        (
            c.compression != "none" and c.precision == "fp16",
            "compression keeps what it left behind in units of fp16's loss scale, which changes: "
            "use precision: bf16",
        ),
        (
            c.compression != "none" and not plain,
            f"compression: {c.compression} is for gradients that are averaged whole: use strategy "
            "ddp, or course without zero_redundancy, pipeline or tensor parallelism",
        ),
        (
            c.compression != "none" and c.communication_pattern not in ("auto", "native"),
            "a compressor sends what it sends by itself: leave communication_pattern out",
        ),
        (
            c.precision == "fp16" and not plain,
            "precision: fp16 scales the loss, which strategy ddp and course without sharding do: "
            "use precision: bf16",
        ),
    ]


def _of_images(c: Config) -> Conflicts:
    """Return conflicts between the keys for data, model and recipe."""
    sides = [c.image_size, *c.progressive_resize.values()]
    return [
        (
            c.decode == "torchvision" and c.data not in ("digits", "imagefolder"),
            f"decode: torchvision is for JPEG files, and data: {c.data} has none: leave decode out",
        ),
        (
            c.model.startswith("resnet") and min(sides) < 16,
            f"{c.model} leaves less than one pixel of images of side {min(sides)}: use 16 or more",
        ),
        (
            c.model in ("vit_s16", "vit_b16") and c.image_size % 16 != 0,
            f"{c.model} cuts images into patches of 16 x 16, and image_size is {c.image_size}: use "
            "a multiple of 16",
        ),
        (
            c.warmup_epochs > c.epochs,
            f"warmup_epochs {c.warmup_epochs:g} is more than epochs {c.epochs}",
        ),
        (
            c.data == "imagefolder" and c.data_dir is None,
            "data: imagefolder needs data_dir, the folder that holds train/ and val/",
        ),
        (
            any(side % 8 or side < 8 for side in c.progressive_resize.values()),
            f"progressive_resize {c.progressive_resize}: sides are multiples of 8",
        ),
        (
            bool(c.progressive_resize) and not c.model.startswith("resnet"),
            f"progressive_resize changes the size of what {c.model} has learnt: use a ResNet",
        ),
    ]


def _of_language(c: Config) -> Conflicts:
    """Return conflicts between the keys for language models and for images."""
    is_text = c.data in ("text", "tokens")
    for_images = [key for key in ("mixup", "cutmix", "channels_last") if getattr(c, key)]
    return [
        (
            c.is_language and not is_text,
            f"model: gpt learns language, and data: {c.data} is images: use data: text or tokens",
        ),
        (
            is_text and not c.is_language,
            f"data: {c.data} is language, and {c.model} is for images: use model: gpt",
        ),
        (
            c.is_language and bool(for_images),
            f"{', '.join(for_images)}: for images alone; leave it out with model: gpt",
        ),
        (
            c.is_language and c.width % c.heads != 0,
            f"width {c.width} is not a multiple of heads {c.heads}: each head gets an equal part",
        ),
        (
            c.is_language and c.heads % c.parallelism.tp != 0,
            f"{c.heads} heads cannot be shared equally by tp={c.parallelism.tp}: use a divisor",
        ),
        (
            c.data == "tokens" and c.data_dir is None,
            "data: tokens needs data_dir, the folder that holds train.bin and val.bin",
        ),
    ]


def _is_vit(c: Config) -> bool:
    return c.model in ("vit_s16", "vit_b16", "transformer")


# Reading


def load_config(path: Path, overrides: Mapping[str, str] | None = None) -> Config:
    """Read a configuration.

    Args:
        path: YAML file.
        overrides: Keys from the command line; their values are parsed as YAML.

    Raises:
        ConfigError: The configuration is wrong. The message has a line for each unknown key, with
            the closest known one; for each value of the wrong type, with the expected type; and for
            conflicting keys.
    """
    given = {key: _value(key, text) for key, text in (overrides or {}).items()}
    read = _read(path)
    for values, where in ((read, str(path)), (given, "the command line")):
        twice = [key for key in FLAT_SIZES if key in values and "parallelism" in values]
        if twice:
            raise ConfigError(f"{where}: {twice[0]} and parallelism: write only parallelism")
    replaced = FLAT_SIZES if "parallelism" in given else ()
    values = {key: value for key, value in read.items() if key not in replaced}
    named = {"parallelism" if key in FLAT_SIZES else key for key in given}
    return make_config({**values, **given}, str(path), named)


def make_config(values: Mapping[str, Any], where: str, options: Container[str] = ()) -> Config:
    """Make a configuration from values, and check it.

    Args:
        values: Values by key.
        where: Source of the values, for error messages.
        options: Keys for which error messages should instead name the command line as the source.

    Raises:
        ConfigError: As for ``load_config``.
    """
    try:
        return Config(**values)
    except ValidationError as error:
        first = {problem["loc"][:1]: problem for problem in reversed(error.errors())}
        lines = [
            f"{'the command line' if _key(problem) in options else where}: {_problem_text(problem)}"
            for problem in reversed(first.values())
        ]
        if set_back := _set_back(values, options):
            lines.append(
                f"{where} sets keys that do not go with the command line: add "
                f"{' '.join(set_back)}, or choose another --config"
            )
        raise ConfigError("\n".join(lines)) from None


def _set_back(values: Mapping[str, Any], options: Container[str]) -> list[str]:
    """Return options that set a file's keys back to their defaults, until none is in conflict.

    The list is empty if the command line conflicts with itself, or if there are no ``options``.
    """
    changed = dict[str, Any]()
    while True:
        try:
            Config(**{**values, **changed})
        except ValidationError as error:
            text = " ".join(problem["msg"] for problem in error.errors())
            more = {
                key: Config.model_fields[key].default
                for key, value in values.items()
                if f"{key}: {value}" in text and key not in options and key not in changed
            }
            if more and options:
                changed |= more
                continue
        return [f"--{key} {default}" for key, default in changed.items()]


def _read(path: Path) -> dict[str, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            values = yaml.load(path.read_text(encoding="utf-8"), _OnceOnly)
    except OSError as error:
        known = ", ".join(sorted(str(p) for p in Path("configs").glob("*.yaml")))
        raise ConfigError(
            f"{path}: {error.strerror}. {f'There are {known}' if known else ''}"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: this is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected lines of the form key: value, got {values!r:.80}")
    return {str(key): value for key, value in values.items()}


class _OnceOnly(yaml.SafeLoader):
    """Refuses duplicate keys; YAML's own loader silently keeps the last one."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"the key {key} comes {keys.count(key)} times")
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def _value(key: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"--{key} {text}: this is no value of YAML") from None


def _key(problem: Any) -> str:
    return ".".join(str(part) for part in problem["loc"][:1])


EXPECTED = {  # first word of pydantic's error type -> expectation
    "int": "expected a whole number",
    "float": "expected a number",
    "bool": "expected true or false",
}


def _problem_text(problem: Any) -> str:
    """Return a message that says what is wrong with one key, and what is expected."""
    key, name = _key(problem), _name(problem)
    if problem["type"] == "extra_forbidden":
        if name != key:
            return f"there is no key {name!r}: use {', '.join(Parallelism.model_fields)}"
        advice = did_you_mean(key, (*Config.model_fields, *FLAT_SIZES))
        return f"there is no key {key!r}. {advice or 'distlab train --help lists all keys.'}"
    if problem["type"] == "value_error" and not key:
        return str(problem["ctx"]["error"])
    return f"{name}: {problem['input']!r} is wrong: {_expected(key, problem)}"


def _name(problem: Any) -> str:
    """Return the key with the problem, such as epochs, or parallelism.pp for one inside it."""
    key, *inner = problem["loc"] or ("",)
    return f"{key}.{inner[0]}" if key == "parallelism" and inner else str(key)


def _expected(key: str, problem: Any) -> str:
    field = Config.model_fields[key]
    choices = [choice for choice in get_args(field.annotation) if isinstance(choice, str | int)]
    if problem["type"] == "literal_error" and choices:
        text = problem["input"]
        advice = did_you_mean(text, map(str, choices)) if isinstance(text, str) else ""
        return f"use one of {', '.join(map(str, choices))}. {advice}".rstrip()
    reason = problem["msg"].removeprefix("Value error, ").partition(" for <class")[0]
    reason = EXPECTED.get(problem["type"].partition("_")[0], reason)
    return f"{reason[:1].lower()}{reason[1:]}. The default is {field.default}"


def described_keys() -> str:
    """Return a line for each key, with its default and, if there are few, the values to choose."""
    lines = list[str]()
    for name, field in Config.model_fields.items():
        is_choice = get_origin(field.annotation) is Literal
        choices = ", ".join(map(str, get_args(field.annotation))) if is_choice else ""
        start = f"    --{name} {'none' if field.default is None else field.default}".ljust(40)
        lines += textwrap.wrap(f"{start}{choices}".rstrip(), 100, subsequent_indent=" " * 40)
    return "\n".join(lines)


def changed_keys(config: Config, earlier: Path) -> list[str]:
    """Return the keys of ``SHAPING`` whose values differ from those in an earlier run's YAML file.

    Each is a text such as ``model was cnn``.
    """
    try:
        before = yaml.safe_load(earlier.read_text(encoding="utf-8"))
        now = config.model_dump(mode="json")
        changed = [key for key in SHAPING if before[key] != now[key]]
        patterns = {values["communication_pattern"] for values in (before, now)}
        if "parameter_server" not in patterns:  # all other patterns leave the same state
            changed = [key for key in changed if key != "communication_pattern"]
        return [f"{key} was {before[key]}" for key in changed]
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return []


def to_yaml(config: Config) -> str:
    """Return a configuration, with all of its keys, as YAML that ``load_config`` can read."""
    return str(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))


def split_arguments(arguments: Sequence[str]) -> dict[str, str]:
    """Parse arguments such as ``--epochs 5 --lr=0.1`` into keys and the texts of their values.

    Raises:
        ConfigError: An argument is neither a key nor the value of one, or a key has no value.
    """
    read: dict[str, str] = {}
    words = list(arguments)
    while words:
        word = words.pop(0)
        name, has_value, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not name:
            advice = f": write --{word}" if re.match(r"\w+=", word) else ""
            raise ConfigError(
                f"{word}: expected --KEY VALUE, with a key of the configuration{advice}"
            )
        if not has_value:
            if not words or words[0].startswith("--"):
                raise ConfigError(f"--{name} has no value: write --{name} VALUE")
            value = words.pop(0)
        read[name.replace("-", "_")] = value
    return read
