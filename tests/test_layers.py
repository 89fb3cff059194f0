"""Who may import whom, proved by importing and by reading every import there is."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dagster_datamask

PACKAGE = Path(dagster_datamask.__file__).parent
PURE = (
    *("selection", "influence", "scoring", "cleaning", "shards", "reporting"),
    *("stages", "demo", "settings", "keyed", "accelerator", "compute"),
)


def modules() -> dict[str, Path]:
    """{dotted module name: file}."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path) -> set[str]:
    """Every module that a file imports, wherever in the file, by its full name."""
    folder = path.relative_to(PACKAGE.parent).parent.parts
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = folder[: len(folder) - node.level + 1] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return names


def under(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def test_pure_code_loads_no_dagster() -> None:
    pure = [name for name in modules() if any(under(name, f"dagster_datamask.{part}") for part in PURE)]
    assert len(pure) > 40
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n  importlib.import_module(name)\n"
    code += "print(*sorted(m for m in sys.modules if m.split('.')[0].startswith('dagster') and 'datamask' not in m))"
    loaded = subprocess.run([sys.executable, "-c", code, *pure], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == []


@pytest.mark.parametrize(
    ("package", "may_import"),
    [
        ("keyed", ()),
        ("accelerator", ()),
        ("compute", ("redaction", "compute")),
        ("selection", ("keyed", "accelerator", "compute", "shards", "selection")),
        ("scoring", ("keyed", "accelerator", "scoring")),
        ("influence", ("keyed", "accelerator", "scoring", "selection", "shards", "influence")),
        ("cleaning", ("keyed", "shards", "cleaning")),
        ("reporting", ("reporting",)),
        ("shards", ("keyed", "redaction", "compute", "shards")),
        (
            "stages",
            (
                "keyed",
                "accelerator",
                "compute",
                "settings",
                "selection",
                "influence",
                "scoring",
                "cleaning",
                "shards",
                "reporting",
                "stages",
                "__version__",
            ),
        ),
    ],
)
def test_a_layer_imports_only_what_lies_below_it(package: str, may_import: tuple[str, ...]) -> None:
    for name, path in modules().items():
        if not under(name, f"dagster_datamask.{package}"):
            continue
        for other in imports(path):
            if under(other, "dagster_datamask") and other != "dagster_datamask":
                part = other.split(".")[1]
                assert part in may_import, f"{name} imports {other}"


def test_nothing_imports_assets_but_definitions() -> None:
    importers = {
        name
        for name, path in modules().items()
        if not under(name, "dagster_datamask.assets")
        and any(under(other, "dagster_datamask.assets") for other in imports(path))
    }
    assert importers == {"dagster_datamask.definitions"}


def test_every_module_says_what_belongs_to_it() -> None:
    for name, path in modules().items():
        source = path.read_text("utf-8").strip()
        assert not source or ast.get_docstring(ast.parse(source)), name


def test_no_module_names_a_place_outside_the_project() -> None:
    for name, path in modules().items():
        text = path.read_text("utf-8")
        assert str(Path.cwd()) not in text, name
        assert "../shared" not in text, name
