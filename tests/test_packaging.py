"""All declarations of dependencies agree, and the repository has no file of one machine or of large size."""

import os
import re
import shutil
import socket
import subprocess
import sys
import zipfile
from itertools import chain
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import captioning
from captioning.checkpoint.export import WEIGHTS
from captioning.checkpoint.load import PRETRAINED_FOLDER

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
PLATFORMS = [
    {"python_version": f"3.{minor}", "python_full_version": f"3.{minor}.5", "sys_platform": system}
    for minor in (10, 11, 12, 13, 14)
    for system in ("linux", "darwin", "win32")
]


def bounds(requirements: list[str]) -> set[tuple[str, frozenset[str], str]]:
    parsed = [Requirement(text) for text in requirements]
    return {(canonicalize_name(r.name), frozenset(r.extras), str(r.specifier)) for r in parsed}


def locked() -> list[Requirement]:
    text = (ROOT / "requirements.txt").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [Requirement(line.split(" --hash=")[0]) for line in lines]


def tracked_files() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    return [path for name in names.decode().split("\0") if name and (path := ROOT / name).is_file()]


def test_environment_yml_asks_for_what_pyproject_asks_for():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    conda = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    (pip,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    assert pip[-1] == "-e ."
    assert bounds(pip[:-1]) == bounds(PROJECT["dependencies"] + EXTRAS["timm"] + EXTRAS["metrics"])
    assert f"python{PROJECT['requires-python']}" in conda


def test_every_requirement_is_pinned_with_hashes_and_without_addresses():
    text = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    assert "://" not in text
    entries = [entry for entry in re.sub(r"#.*\n", "", text).replace("\\\n", " ").splitlines() if entry]
    assert entries and all("==" in entry and " --hash=sha256:" in entry for entry in entries)


@pytest.mark.parametrize("platform", PLATFORMS, ids=lambda p: f"{p['python_version']}-{p['sys_platform']}")
def test_requirements_pin_each_dependency_once_and_within_its_bounds(platform):
    pins: dict[str, list[Requirement]] = {}
    for requirement in locked():
        if requirement.marker is None or requirement.marker.evaluate({**platform, "extra": ""}):
            pins.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    assert not {name: versions for name, versions in pins.items() if len(versions) > 1}
    for wanted in map(Requirement, [*PROJECT["dependencies"], *chain.from_iterable(EXTRAS.values())]):
        assert canonicalize_name(wanted.name) in pins, f"{wanted}: run `make lock`"
        ((version,),) = [[s.version for s in pin.specifier] for pin in pins[canonicalize_name(wanted.name)]]
        assert wanted.specifier.contains(version), f"{wanted} but {version} is pinned: run `make lock`"


def test_the_version_is_the_newest_of_the_changelog_and_the_one_to_cite():
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    versions = [heading for heading in headings if heading != "Unreleased"]
    assert versions[0].split()[0] == captioning.__version__
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == captioning.__version__


def test_an_editable_install_is_imported_in_the_folder_above_a_clone_of_its_name(tmp_path):
    for name in ("pyproject.toml", "README.md", "LICENSE", "captioning/__init__.py"):
        (tmp_path / "captioning" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "captioning" / name)
    build = "from setuptools.build_meta import build_editable; build_editable('..')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path / "captioning", check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site-packages")
    code = "import site; site.addsitedir('site-packages'); import captioning; print(captioning.__version__)"
    command = [sys.executable, "-S", "-c", code]  # -S: without the captioning that is installed here
    environment = os.environ | {"PYTHONPATH": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == captioning.__version__, done.stderr


def test_ci_runs_exactly_the_test_command():
    assert (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()[-2:] == ["make check", "make test"]


# Written in pieces, so that this file does not match itself.
FORBIDDEN = {
    "a registry's or mirror's address": r"(?:pypi|pytho" + r"nhosted|npm" + r"js|ana" + r"conda)\.(?:org|com)"
    r"|index" + r"-url|registry *= *[\"']?ht" + r"tp|resolved\"?: *\"ht" + r"tp|download\.py" + r"torch\.org/whl",
    "a path of one machine": r"(?<![\w.~-])/(?:wo" + r"rk|ro" + r"ot|home/\w+|Use" + r"rs/\w+)/",
    "unfinished work": r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b",
}


def test_no_tracked_file_names_a_registry_or_a_path_of_one_machine():
    contents = {path.relative_to(ROOT): path.read_bytes() for path in tracked_files()}
    violations = [
        f"{path}:{number}: {what}: {line.strip()[:100]}"
        for path, content in contents.items()
        for number, line in enumerate([] if b"\0" in content else content.decode().splitlines(), start=1)
        for what, pattern in FORBIDDEN.items()
        if re.search(pattern, line)
    ]
    assert not violations, "\n".join(violations)


def test_no_tracked_file_but_the_pretrained_weights_is_larger_than_one_mebibyte():
    large = [path for path in tracked_files() if path.stat().st_size > 2**20]
    assert [str(path) for path in large if path != PRETRAINED_FOLDER / WEIGHTS] == []


def test_tests_cannot_reach_the_network():
    with pytest.raises(OSError, match=r"tests have no network: look-up of example\.org"):
        socket.create_connection(("example.org", 80))
    with socket.socket() as connection, pytest.raises(OSError, match=r"no network: connection to 192\.0\.2\.1"):
        connection.connect(("192.0.2.1", 80))
