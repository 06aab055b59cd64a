"""YAML as people mean it."""

from __future__ import annotations

import math

import pytest

from lbpar.config.section import parse_bytes
from lbpar.config.yaml_text import dump_yaml, parse_yaml
from lbpar.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5e-4", 5e-4),
        ("1E3", 1000.0),
        ("-.5", -0.5),
        ("3", 3),
        ("-3", -3),
        ("010", 10),
        ("0x1F", 31),
        ("1_000", "1_000"),
        ("12:30", "12:30"),
        ("no", "no"),
        ("on", "on"),
        ("Y", "Y"),
        ("true", True),
        ("False", False),
        ("~", None),
        ("", None),
        (".inf", math.inf),
        ("'3'", "3"),
        ("2026-01-01", "2026-01-01"),
    ],
)
def test_scalars(text: str, value: object) -> None:
    got = parse_yaml(text, "here")
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    "value", ["5e-4", "1e3", "no", "3", "true", "null", "0x1F", "12:30", "", "a: b", 5e-4, 1e-12, 3, None, True]
)
def test_dump_reads_back(value: object) -> None:
    got = parse_yaml(dump_yaml({"v": value}), "here")["v"]
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\nb: {c: 1,\n c: 2}", "line 3: field 'c' is given twice (first on line 2)"),
        ("a: !!python/object:os.system 3", "not valid YAML"),
        ("a: &x [1]\nb: *y", "line 2, column 4: not valid YAML: found undefined alias 'y'"),
        ("? [1, 2]\n: 3", "line 1: a field name may not be"),
        ("a: \x00", "not valid YAML"),
        ("- " * 3000, "nested too deeply"),
    ],
)
def test_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as e:
        parse_yaml(text, "here")
    assert words in str(e.value)
    assert str(e.value).startswith("here: ")


def test_merge_keys_still_work() -> None:
    assert parse_yaml("a: &x {p: 1, q: 2}\nb: {<<: *x, q: 3}", "here")["b"] == {"p": 1, "q": 3}


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ("16GB", 16 * 10**9),
        ("16GiB", 16 * 2**30),
        ("512 MB", 512 * 10**6),
        ("1.5kb", 1500),
        ("12", 12),
        (7, 7),
        ("2TiB", 2**41),
    ],
)
def test_bytes(given: object, value: int) -> None:
    assert parse_bytes(given) == value


@pytest.mark.parametrize("given", ["16 apples", "GB", -1, 1.5, True, None, "-3GB", []])
def test_bytes_refused(given: object) -> None:
    with pytest.raises(ValueError, match="amount of memory"):
        parse_bytes(given)
