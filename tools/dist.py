"""`make dist`: builds what a release consists of, into dist/.

- `oatmill-VERSION.tar.gz` and `oatmill-VERSION-py3-none-any.whl`: the source, and the wheel of pure Python;
- `oatmill_kernels-VERSION-py3-none-PLATFORM.whl`: the CPU kernels, compiled for each kind of CPU, for one torch;
- `oatmill-VERSION.cdx.json`: what a fresh installation consists of (an SBOM, CycloneDX 1.6);
- `SHA256SUMS`.

The same commit, compiler and torch give the same bytes.
"""

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import tomllib
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tgi_server.engine.kernels.build import PACKAGE, TARGETS, prepare

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

KERNELS_PROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "oatmill-kernels"
version = "{version}"
description = "The CPU kernels of oatmill, compiled for each kind of {machine}."
requires-python = ">=3.11"
license = "Apache-2.0"
license-files = ["LICENSE"]
dependencies = ["torch=={torch}"]

[tool.setuptools]
packages = ["{package}"]

[tool.setuptools.package-data]
"*" = ["*.so"]
"""


def main() -> int:
    """Returns 0, or 1 if something could not be built."""
    parser = argparse.ArgumentParser(prog="python -m tools.dist", description="Builds a release into dist/.")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"kinds of CPUs (default: {', '.join(TARGETS)})")
    targets = parser.parse_args().targets or list(TARGETS)
    commit_time = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True)
    os.environ.setdefault("SOURCE_DATE_EPOCH", commit_time.stdout.strip() or "315532800")
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    print("building: sdist and wheel", flush=True)
    _build(ROOT, "--sdist", "--wheel")
    print(f"building: kernels for {', '.join(targets)}", flush=True)
    if not _build_kernels(targets):
        return 1
    (DIST / f"oatmill-{VERSION}.cdx.json").write_text(json.dumps(_bill_of_materials(), indent=1) + "\n")
    files = sorted(file for file in DIST.iterdir() if file.is_file())
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}" for file in files]
    (DIST / "SHA256SUMS").write_text("\n".join(sums) + "\n")
    print(*sums, sep="\n")
    return 0


def _build(project: Path, *kinds: str) -> None:
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(DIST), *kinds, str(project)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _build_kernels(targets: list[str]) -> bool:
    with tempfile.TemporaryDirectory() as place:
        project = Path(place)
        package = project / PACKAGE
        package.mkdir()
        (package / "__init__.py").write_text('"""The CPU kernels of oatmill, one library for each kind of CPU."""\n')
        if not prepare(targets, package):
            return False
        shutil.copy(ROOT / "LICENSE", project)
        values = {"version": VERSION, "machine": platform.machine(), "package": PACKAGE}
        release = torch.__version__.partition("+")[0]
        (project / "pyproject.toml").write_text(KERNELS_PROJECT.format(torch=release, **values))
        _build(project, "--wheel")
    wheel = next(DIST.glob(f"{PACKAGE}-*-any.whl"))
    tag = ["--platform-tag", _platform_tag(), "--remove", str(wheel)]
    subprocess.run([sys.executable, "-m", "wheel", "tags", *tag], check=True, stdout=subprocess.DEVNULL)
    return True


def _platform_tag() -> str:
    """Returns the tag of the oldest system that runs what this one compiles: PEP 600."""
    library, release = platform.libc_ver()
    if library != "glibc":
        return f"linux_{platform.machine()}"
    return f"manylinux_{release.replace('.', '_')}_{platform.machine()}"


def _bill_of_materials() -> dict[str, object]:
    """Returns a CycloneDX document of the packages that the extra `engine` installs, with their versions here."""
    needed, queue = dict[str, Distribution](), [Requirement("oatmill[engine]")]
    installed = {canonicalize_name(each.metadata["Name"]) for each in distributions()}
    seen = set[tuple[str, str]]()
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        if name not in installed:
            continue
        needed[name] = distribution(name)
        for extra in ("", *requirement.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            for text in needed[name].requires or ():
                each = Requirement(text)
                if each.marker is None or each.marker.evaluate({"extra": extra}):
                    queue.append(each)
    components = [
        {
            "type": "library",
            "name": name,
            "version": each.version,
            "purl": f"pkg:pypi/{name}@{each.version}",
            "licenses": [{"license": {"name": text}}] if (text := _license(each)) else [],
        }
        for name, each in sorted(needed.items())
        if name != "oatmill"
    ]
    product = {"type": "application", "name": "oatmill", "version": VERSION, "purl": f"pkg:pypi/oatmill@{VERSION}"}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "metadata": {"component": product},
        "components": components,
    }


def _license(package: Distribution) -> str:
    found = package.metadata.json
    text = str(found.get("license_expression") or found.get("license") or "").strip()
    return text.splitlines()[0][:100] if text else ""


if __name__ == "__main__":
    sys.exit(main())
