"""`python -m tests.audit`: the locked dependencies against published advisories, or, where none can be had, the lock.

The lock, `requirements.lock`, is what deploy/ installs: every version with the hashes of its files, of all platforms.
Exit status 1 for a known vulnerability or a lock that does not agree with pyproject.toml and constraints.txt.
"""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPO = Path(__file__).parents[1]
LOCK = REPO / "requirements.lock"
# as deploy/Dockerfile installs it
EXTRAS = ("s3", "ray", "k8s", "postgres")
_HASH = re.compile(r"--hash=(sha256:[0-9a-f]{64})")


def locked(text: str) -> dict[str, tuple[str, list[str]]]:
    """{canonical name: (version, hashes)} of a lock. Raises ValueError for what is no pinned, hashed requirement."""
    found: dict[str, tuple[str, list[str]]] = {}
    for entry in re.sub(r"\\\n\s*", " ", text).splitlines():
        pinned, *hashes = entry.split(" --hash=")
        requirement = Requirement(pinned)
        versions = [part.version for part in requirement.specifier if part.operator == "=="]
        if requirement.url or len(versions) != 1 or not hashes or len(_HASH.findall(entry)) != len(hashes):
            raise ValueError(f"{pinned}: not one version with hashes")
        found[canonicalize_name(requirement.name)] = (versions[0], _HASH.findall(entry))
    return found


def disagreements(lock: str, constraints: str, project: dict) -> list[str]:
    """What a lock lacks or has otherwise than constraints.txt and pyproject.toml say; empty where they agree."""
    told, pins = [], locked(lock)
    for line in constraints.splitlines():
        requirement = Requirement(line) if line and not line.startswith("#") else None
        if (
            requirement
            and (pin := pins.get(canonicalize_name(requirement.name)))
            and pin[0] not in requirement.specifier
        ):
            told.append(f"{requirement.name}: {pin[0]} is locked, constraints.txt has {requirement.specifier}")
    wanted = [*project["dependencies"], *(r for name in EXTRAS for r in project["optional-dependencies"][name])]
    for requirement in map(Requirement, wanted):
        pin = pins.get(canonicalize_name(requirement.name))
        if pin is None or pin[0] not in requirement.specifier:
            told.append(f"{requirement}: {'not locked' if pin is None else f'{pin[0]} is locked'}")
    return told


def main() -> int:
    text = LOCK.read_text("utf-8")
    project = tomllib.loads((REPO / "pyproject.toml").read_text("utf-8"))["project"]
    told = disagreements(text, (REPO / "constraints.txt").read_text("utf-8"), project)
    if told:
        print("\n".join([*told, "the lock is out of date: make lock"]))
        return 1
    print(f"{LOCK.name}: {len(locked(text))} packages, each one version with its hashes, as the project asks for them")
    asked = subprocess.run(
        [sys.executable, "-m", "pip_audit", "-r", LOCK, "--disable-pip", "--require-hashes", "-f", "json"],
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        packages = json.loads(asked.stdout)["dependencies"]
    except (ValueError, KeyError):
        print(f"advisories could not be asked for: {(asked.stderr.strip().splitlines() or ['no answer'])[-1]}")
        return 0
    audited = [package for package in packages if "vulns" in package]
    for package in audited:
        for found in package["vulns"]:
            print(f"{package['name']} {package['version']}: {found['id']}, mended in {found['fix_versions'] or 'none'}")
    print(f"advisories: {len(audited)} of {len(packages)} packages could be looked up")
    return int(any(package["vulns"] for package in audited))


if __name__ == "__main__":
    sys.exit(main())
