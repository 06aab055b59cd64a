"""Quantities and names as people read them."""

from __future__ import annotations

import pytest

from lbpar.text import human_bytes, human_seconds, nearest


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (264_123, "264 kB"), (12_300_000_000, "12.3 GB")]
)
def test_sizes(nbytes, text):
    assert human_bytes(nbytes) == text


@pytest.mark.parametrize(("seconds", "text"), [(2.0, "2 s"), (0.0123, "12.3 ms"), (4.5e-6, "4.5 µs"), (0, "0 µs")])
def test_seconds(seconds, text):
    assert human_seconds(seconds) == text


def test_the_nearest_name_is_found_in_any_case_and_the_first_wins():
    assert nearest("RESNET8", ["resnet18", "vgg11"]) == "did you mean 'resnet18'? "
    assert nearest("n", ["N", "H"]) == "did you mean 'N'? "
    assert nearest("zebra", ["conv", "relu"]) == ""
