"""The lock agrees with what the project asks for, names files by their hashes, and does not say where it was made."""

import re
import tomllib
from typing import Any

import pytest

from tests.audit import EXTRAS, LOCK, REPO, disagreements, locked

HASH = "sha256:" + "0" * 64


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((REPO / "pyproject.toml").read_text("utf-8"))["project"]
    return found


def test_the_lock_is_of_this_project() -> None:
    text = LOCK.read_text("utf-8")
    assert disagreements(text, (REPO / "constraints.txt").read_text("utf-8"), project()) == []
    assert len(locked(text)) > 100
    # neither where from nor where made
    assert not re.search(r"https?:|file:|index|find-links|/opt|/work|/root", text)


def test_what_disagrees_is_named() -> None:
    wanted = {
        "dependencies": ["a>=1,<2", "b"],
        "optional-dependencies": {extra: [] for extra in EXTRAS},
    }
    lock = f"a==2.0 \\\n    --hash={HASH}\nb==1 ; sys_platform == 'linux' \\\n    --hash={HASH} \\\n    --hash={HASH}\n"
    assert locked(lock) == {"a": ("2.0", [HASH]), "b": ("1", [HASH, HASH])}
    assert disagreements(lock, "# pins\nb==2\n", wanted) == [
        "b: 1 is locked, constraints.txt has ==2",
        "a<2,>=1: 2.0 is locked",
    ]
    assert disagreements(lock, "", {**wanted, "dependencies": ["c"]}) == ["c: not locked"]


@pytest.mark.parametrize(
    "line",
    [
        "a==1",
        f"a>=1 --hash={HASH}",
        "a==1 --hash=md5:00",
        f"a @ https://x.example/a.whl --hash={HASH}",
        f"a --hash={HASH}",
    ],
)
def test_what_pins_nothing_is_no_lock(line: str) -> None:
    with pytest.raises(ValueError, match="not one version with hashes"):
        locked(line)
