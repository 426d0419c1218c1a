"""The trainer's configuration: every mistake is reported in one line that names the file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from distlab.production.config import Config, load_config, make_config, split_arguments
from distlab.production.errors import ConfigError
from distlab.production.launching import processes_of

ROOT = Path(__file__).parents[3]
COURSE = {"strategy": "course"}
TEXT = {"model": "gpt", "data": "text"}


def refusal(values: Mapping[str, Any]) -> str:
    """Return the one-line error for these values, without the file name."""
    with pytest.raises(ConfigError) as caught:
        make_config(values, "my.yaml")
    (line,) = str(caught.value).splitlines()
    assert line.startswith("my.yaml: ")
    return line.removeprefix("my.yaml: ")


def written(folder: Path, text: str) -> Path:
    path = folder / "my.yaml"
    path.write_text(text, encoding="utf-8")
    return path


# --- keys and values -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("epoch", "epochs"),
        ("Batch_Size", "batch_size"),
        ("hue", ""),
        ("pipeline_paralelism", "pipeline_parallelism"),
        ("zero_redundency", "zero_redundancy"),
    ],
)
def test_an_unknown_key_names_the_nearest_one(wrong: str, nearest: str) -> None:
    told = refusal({wrong: 3})
    assert f"there is no key {wrong!r}" in told
    assert (f"Did you mean {nearest!r}?" if nearest else "distlab train --help") in told


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("epochs", "many", "a whole number"),
        ("epochs", 2.5, "a whole number"),
        ("epochs", None, "a whole number"),
        ("epochs", True, "true and false are for switches"),
        ("epochs", 0, "greater than or equal to 1. The default is 10"),
        ("lr", "fast", "a number"),
        ("lr", -0.1, "greater than 0"),
        ("lr", False, "true and false are for switches"),
        ("lr", float("nan"), "is wrong"),
        ("lr", float("inf"), "a finite number"),
        ("ema_decay", 1, "less than 1"),
        ("metrics_port", 65536, "less than or equal to 65535"),
        ("channels_last", "perhaps", "true or false"),
        ("num_gpus", "all", "The default is auto"),
        ("num_gpus", 0, "use auto, or 1 or more"),
        ("num_gpus", True, "true and false are for switches"),
        ("run_dir", 5, "not a valid path. The default is out/run"),
        ("progressive_resize", 3, "a valid dictionary"),
        ("progressive_resize", {"first": 8}, "a whole number"),
        ("progressive_resize", {0: "small"}, "a whole number"),
    ],
)
def test_a_value_of_a_wrong_type_or_size(key: str, value: object, expected: str) -> None:
    told = refusal({key: value})
    assert told.startswith(f"{key}: ")
    assert expected in told
    assert "<class" not in told


CHOICES = {
    key: get_args(field.annotation)
    for key, field in Config.model_fields.items()
    if key != "num_gpus" and all(isinstance(c, str | int) for c in get_args(field.annotation))
    if get_args(field.annotation)
}


@pytest.mark.parametrize("key", CHOICES)
def test_a_wrong_choice_names_all_choices(key: str) -> None:
    told = refusal({key: f"{CHOICES[key][0]}x"})
    assert f"use one of {', '.join(map(str, CHOICES[key]))}." in told
    if isinstance(CHOICES[key][0], str):
        assert f"Did you mean {CHOICES[key][0]!r}?" in told


def test_all_that_is_wrong_is_told_at_once_in_the_order_of_the_file() -> None:
    with pytest.raises(ConfigError) as caught:
        make_config({"num_gpus": "x", "epochs": 0, "modle": "resnet18"}, "my.yaml")
    lines = str(caught.value).splitlines()
    assert [line.split()[1] for line in sorted(lines)] == ["epochs:", "num_gpus:", "there"]


# --- keys that do not go together ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"communication_pattern": "ring"}, "set strategy: course"),
        ({"strategy": "fsdp", "zero_redundancy": 2}, "zero_redundancy: 2 asks for the course's"),
        ({"strategy": "ddp", "tensor_parallelism": 2}, "parallelism: tp=2 asks for the course's"),
        ({"data": "imagefolder"}, "needs data_dir"),
        ({"strategy": "fsdp", "compression": "sign"}, "averaged whole"),
        ({**COURSE, "zero_redundancy": 1, "compression": "int8"}, "averaged whole"),
        ({**COURSE, "communication_pattern": "tree", "compression": "top_k"}, "leave"),
        ({"strategy": "fsdp", "precision": "fp16"}, "use precision: bf16"),
        ({**COURSE, "zero_redundancy": 3, "precision": "fp16"}, "use precision: bf16"),
        ({**COURSE, "tensor_parallelism": 2}, "resnet18 has none"),
        (
            {**COURSE, "model": "transformer", "tensor_parallelism": 2, "zero_redundancy": 2},
            "set zero_redundancy: 1",
        ),
        (
            {**COURSE, "pipeline_parallelism": 2, "communication_pattern": "parameter_server"},
            "leave it out",
        ),
        ({**COURSE, "pipeline_parallelism": 2, "accumulate": 2}, "leave accumulate"),
        ({**COURSE, "zero_redundancy": 2, "communication_pattern": "ring"}, "averaged whole"),
        ({"compression": "sign", "precision": "fp16"}, "use precision: bf16"),
        ({"decode": "torchvision", "data": "cifar10"}, "data: cifar10 has none"),
        ({**TEXT, "decode": "torchvision"}, "leave decode out"),
        ({"image_size": 8}, "use 16 or more"),
        ({"image_size": 64, "progressive_resize": {0: 8}}, "use 16 or more"),
        ({"warmup_epochs": 5, "epochs": 4}, "warmup_epochs 5 is more than epochs 4"),
        ({**COURSE, "communication_pattern": "parameter_server", "clip_norm": 1.0}, "clip_norm"),
        ({**COURSE, "pipeline_parallelism": 2, "clip_norm": 1.0}, "clip_norm"),
        ({**COURSE, "zero_redundancy": 1, "decay_norms": False}, "decay_norms"),
        ({**COURSE, "communication_pattern": "parameter_server", "decay_norms": False}, "decay_"),
        ({"model": "vit_s16", "image_size": 40}, "multiple of 16"),
        ({"progressive_resize": {0: 20}}, "multiples of 8"),
        ({"model": "transformer", "progressive_resize": {0: 16}}, "use a ResNet"),
        ({"model": "gpt"}, "data: digits is images"),
        ({"data": "text"}, "resnet18 is for images"),
        ({**TEXT, "mixup": 0.2, "channels_last": True}, "mixup, channels_last: for images alone"),
        ({**TEXT, "width": 30}, "width 30 is not a multiple of heads 4"),
        ({"backend": "nccl", "device": "cpu"}, "backend: nccl needs GPUs"),
        (
            {**COURSE, "communication_pattern": "shared_memory", "backend": "sim"},
            "shared_memory is for gloo",
        ),
        ({"cluster": "dgx-h100"}, "add backend: sim"),
        (
            {**COURSE, "gradients": "flat", "zero_redundancy": 1},
            "averages gradients after the backward",
        ),
        ({**TEXT, **COURSE, "tensor_parallelism": 3}, "4 heads cannot be shared equally by tp=3"),
        ({"model": "gpt", "data": "tokens"}, "data: tokens needs data_dir"),
    ],
)
def test_keys_that_do_not_go_together(values: dict[str, Any], told: str) -> None:
    assert told in refusal(values)


# --- sizes of the mesh ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "sizes"),
    [
        ("dp=2,pp=2,tp=2", (2, 2, 2)),
        ("dp=1,pp=2", (1, 2, 1)),
        (" tp=2 , dp=auto", ("auto", 1, 2)),
        ({"pp": 3}, ("auto", 3, 1)),
        ({"dp": 4, "tp": 2}, (4, 1, 2)),
    ],
)
def test_sizes_are_one_text_or_a_key_each(value: object, sizes: tuple[Any, ...]) -> None:
    found = make_config({"model": "transformer", "parallelism": value, **COURSE}, "").parallelism
    assert (found.dp, found.pp, found.tp) == sizes
    assert make_config({"parallelism": str(found), **TEXT, **COURSE}, "").parallelism == found


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("dp=2,ep=2", "'ep=2' is no dp, pp or tp with a size: write dp=2,pp=2,tp=2"),
        ("pp=2,pp=2", "pp is there twice"),
        ("pp=-1", "'pp=-1' is no dp"),
        ({"pp": 0}, "parallelism.pp: 0 is wrong: input should be greater than or equal to 1"),
        ({"pp": True}, "parallelism.pp: True is wrong: expected a whole number"),
        ({"dp": 0}, "parallelism.dp: 0 is wrong: input should be greater than or equal to 1"),
        ({"ep": 2}, "there is no key 'parallelism.ep': use dp, pp, tp"),
        (3, "parallelism: 3 is wrong"),
    ],
)
def test_wrong_sizes(value: object, told: str) -> None:
    assert told in refusal({**COURSE, "parallelism": value})


def test_the_newest_form_of_a_size_counts(tmp_path: Path) -> None:
    text = "strategy: course\nmodel: transformer\npipeline_parallelism: 2\n"
    path = written(tmp_path, text)
    assert load_config(path).parallelism.pp == 2
    assert load_config(path, {"parallelism": "tp=2"}).parallelism.pp == 1
    path = written(tmp_path, text.replace("pipeline_parallelism: 2", "parallelism: {pp: 2}"))
    both = load_config(path, {"tensor_parallelism": "2"}).parallelism
    assert (both.pp, both.tp) == (2, 2)
    with pytest.raises(ConfigError, match=r"line: parallelism\.tp: 0 is wrong"):
        load_config(path, {"tensor_parallelism": "0"})
    twice = written(tmp_path, f"{text}parallelism: {{tp: 2}}\n")
    with pytest.raises(ConfigError, match="pipeline_parallelism and parallelism: write only"):
        load_config(twice)


@pytest.mark.parametrize(
    ("keys", "num_nodes", "processes"),
    [
        ({"num_gpus": 3}, 1, 3),
        ({"parallelism": "dp=2,pp=2,tp=2"}, 1, 8),
        ({"parallelism": "dp=2,pp=2,tp=2"}, 2, 4),
        ({"parallelism": "pp=3"}, 1, 3),
    ],
)
def test_as_many_processes_start_as_the_sizes_need(
    keys: dict[str, Any], num_nodes: int, processes: int
) -> None:
    config = make_config({**TEXT, **COURSE, "device": "cpu", **keys}, "")
    assert processes_of(config, num_nodes) == processes


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("epochs: 3\nlr: 0.1\nepochs: 4\n", "the key epochs comes 2 times"),
        ("epochs: [3\n", "this is no YAML"),
        ("epochs 3\n", "expected lines of the form key: value, got 'epochs 3'"),
        ("- epochs\n", "expected lines of the form key: value"),
        ("", "expected lines of the form key: value, got None"),
        ("epochs: !!python/object/apply:os.getcwd []\n", "this is no YAML"),
        ("progressive_resize: {0: 16, 0: 32}\n", "the key 0 comes 2 times"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, text: str, told: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_names_those_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "small.yaml").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_config(Path("smal.yaml"))
    assert str(caught.value) == (
        "smal.yaml: No such file or directory. There are configs/small.yaml"
    )
    with pytest.raises(ConfigError, match=r"configs: Is a directory"):
        load_config(Path("configs"))


SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_a_configuration_of_the_course_loads(path: Path) -> None:
    overrides = {"data_dir": "images"} if "imagenet" in path.name else {}
    config = load_config(path, overrides)
    for key, value in yaml.safe_load(path.read_text(encoding="utf-8")).items():
        assert key in Config.model_fields
        if isinstance(value, str) and key not in overrides:
            assert str(getattr(config, key)) == value


def test_keys_of_a_file_that_an_option_rules_out_come_with_what_to_add(tmp_path: Path) -> None:
    file = tmp_path / "here.yaml"
    file.write_text("strategy: course\ngradients: flat\ncommunication_pattern: tree\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file, {"zero_redundancy": "2"})
    added = "add --communication_pattern auto --gradients buckets, or choose another --config"
    assert str(caught.value).endswith(added)
    with pytest.raises(ConfigError, match=r"set zero_redundancy: 1$"):  # the options' own conflict
        load_config(
            file,
            {
                "zero_redundancy": "2",
                "parallelism": "pp=2",
                "gradients": "buckets",
                "communication_pattern": "auto",
            },
        )


# --- the command line ----------------------------------------------------------------------------


def test_the_command_line_changes_any_key(tmp_path: Path) -> None:
    path = written(tmp_path, "epochs: 3\nlr: 0.1\n")
    words = ["--epochs", "5", "--lr=1e-3", "--channels-last", "true", "--seed", "7"]
    config = load_config(path, split_arguments([*words, "--progressive_resize", "{0: 16}"]))
    assert (config.epochs, config.lr, config.channels_last) == (5, 1e-3, True)
    assert (config.progressive_resize, config.seed) == ({0: 16}, 7)
    assert load_config(path).epochs == 3


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("epochs 5", "epochs: expected --KEY VALUE"),
        ("-epochs 5", "-epochs: expected --KEY VALUE"),
        ("-- 5", "--: expected --KEY VALUE"),
        ("--=5", "--=5: expected --KEY VALUE"),
        ("epochs=5", "a key of the configuration: write --epochs=5"),
        ("--epochs", "--epochs has no value: write --epochs VALUE"),
        ("--epochs --lr 1", "--epochs has no value"),
        ("--epochs 5 7", "7: expected --KEY VALUE"),
    ],
)
def test_a_command_line_without_keys_or_values(words: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        split_arguments(words.split())
    assert told in str(caught.value)
