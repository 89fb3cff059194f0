"""Who may import whom, proved by importing and by reading every import there is."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import dagster_datamask

PACKAGE = Path(dagster_datamask.__file__).parent
PURE = (
    *("selection", "influence", "scoring", "cleaning", "shards", "reporting"),
    *("stages", "demo", "settings", "keyed", "accelerator", "compute"),
)

# modules that are imported by name where their extra is asked for, and by no other of the package at its own import
OF_AN_EXTRA = ("dagster_datamask.resources.ray_of_the_run",)


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


def third_party(path: Path, distributions: Mapping[str, list[str]]) -> dict[str, tuple[set[str], bool]]:
    """{module that a file imports: (the distributions that it may be of, whether importing the file takes it)}.

    What stands in a function or in a `try` is not taken.
    """
    tree = ast.parse(path.read_text("utf-8"))
    own = {id(node) for node in tree.body}
    found: dict[str, tuple[set[str], bool]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        else:
            continue
        for module in {name.partition(".")[0] for name in names} - {"dagster_datamask", *sys.stdlib_module_names}:
            owners = {canonicalize_name(owner) for owner in distributions.get(module, [module])}
            found[module] = owners, id(node) in own or found.get(module, (owners, False))[1]
    return found


def test_every_library_is_declared() -> None:
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text("utf-8"))["project"]
    always = {canonicalize_name(Requirement(line).name) for line in project["dependencies"]}
    extras = {
        canonicalize_name(Requirement(line).name)
        for lines in project["optional-dependencies"].values()
        for line in lines
    }
    distributions = packages_distributions()
    needed: set[str] = set()
    for name, path in modules().items():
        for module, (owners, at_import) in third_party(path, distributions).items():
            allowed = always if at_import and name not in OF_AN_EXTRA else always | extras
            assert owners & allowed, f"{name} imports {module}, and pyproject.toml does not ask for it"
            needed |= owners
    assert {"numpy", "dagster", "fasttext-community", "ray"} <= needed


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
