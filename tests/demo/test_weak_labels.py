"""The labelling rules on texts whose label a reader would not dispute, and their limits on anything."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_datamask.demo.weak_labels import dclm_label, edu_label, form, introduction, wiki_label

EXPLAINS = """Sorting a list changes the order of its items and nothing else.

If you want the original order as well, sort a copy of it instead, because sorting in place cannot be undone. For
example, the following call leaves the list as it was and gives you a new one. Why does this matter? A second function
may still hold the same list, and it would see the change too.

    >>> sorted([3, 1, 2])
    [1, 2, 3]
"""
CHANGELOG = """## 2.1.0 (2026-03-01)

- Fixed a crash when the list is empty (#1234)
- Added support for Python 3.14 (#1240)
- Removed the deprecated argument (#1241)

## 2.0.9

- Fixed a typo in the documentation (#1201)
"""
PARAMETERS = """Sort the list.

Parameters
----------
items : list
    The items.
key : callable, optional
    The key.
reverse : bool
    Whether to reverse.

Returns
-------
list : list
    Sorted.
"""
DESCRIBES = """Merge sort is a sorting algorithm that divides a sequence into halves, sorts each half and merges the
results into one sequence. It was described in the middle of the twentieth century and is among the oldest methods in
use. The number of comparisons is proportional to the length of the sequence times its logarithm, which is the best that
any comparison sort can reach.
"""
LICENCE = """Copyright (c) 2026 The authors. All rights reserved. Permission is hereby granted, free of charge, to any
person obtaining a copy of this software, to deal in the software without restriction and without warranty of any kind.
"""
BADGES = """[![CI](https://img.shields.io/ci.svg)](https://a.example/ci) [![PyPI](https://img.shields.io/p.svg)](https://b)
[![Docs](https://img.shields.io/docs.svg)](https://a.example/docs)
"""


@pytest.mark.parametrize(
    ("text", "dclm", "wiki"),
    [
        (EXPLAINS, 1, None),
        (DESCRIBES, None, 1),
        (CHANGELOG, 0, 0),
        (PARAMETERS, 0, 0),
        (LICENCE, 0, 0),
        (BADGES, 0, 0),
        ("", 0, 0),
    ],
    ids=["explains", "describes", "changelog", "parameters", "licence", "badges", "empty"],
)
def test_clear_cases(text: str, dclm: int | None, wiki: int | None) -> None:
    assert (dclm_label(form(text)), wiki_label(form(text))) == (dclm, wiki)


def test_educational_value_orders_the_clear_cases() -> None:
    values = {
        name: edu_label(form(text)) for name, text in globals().items() if isinstance(text, str) and name.isupper()
    }
    assert values["EXPLAINS"] > values["DESCRIBES"] > values["PARAMETERS"] > values["CHANGELOG"] == 0.0
    assert values["LICENCE"] < values["DESCRIBES"]


def test_introduction_ends_before_the_first_listing() -> None:
    assert introduction(DESCRIBES + "\n" + PARAMETERS).split("\n\n")[0] == DESCRIBES.strip()
    assert "Parameters" not in introduction(DESCRIBES + "\n" + PARAMETERS)
    assert introduction(PARAMETERS.split("\n\n", 1)[1]) == ""
    assert introduction("") == ""


def test_no_text_is_no_form() -> None:
    assert form("") == form(" \n\n\t")
    assert form("").sentence_words == 0.0


@given(st.text(max_size=400))
def test_any_text_has_labels_in_range(text: str) -> None:
    f = form(text)
    assert 0.0 <= edu_label(f) <= 5.0
    assert dclm_label(f) in (0, 1, None)
    assert wiki_label(f) in (0, 1, None)
    assert introduction(text) == introduction(text).strip()
    assert all(0.0 <= share <= 1.0 for share in (f.prose, f.code, f.parameters, f.changelog))
    assert f.prose + f.code + f.parameters + f.changelog <= 1.0 + 1e-9


@pytest.mark.parametrize("repeated", ["#", "a.b(", "[", "* ", "word_", ":x ", "1.", "-", "a, ", "<"])
def test_a_hostile_line_does_not_stall_the_rules(repeated: str) -> None:
    # A release heading's pattern once backtracked exponentially on a line of number signs; 50,000 would never end.
    form(repeated * 50_000)
