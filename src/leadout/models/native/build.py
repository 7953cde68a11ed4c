"""Compiles the native kernels on first use and keeps the library.

The library is made for the very processor it runs on, by the system's C++ compiler, and kept under a name that hashes
the sources, the flags, the compiler and the processor: a change of any makes a new one. It is written beside its final
name and renamed, so that processes that race do the work twice and agree.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

_FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-pthread", "-w")
_SECONDS = 300

NEEDED = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16"})
"""Instruction sets without which there are no kernels."""


class BuildError(Exception):
    """The kernels cannot be had here; the message is one line."""


def source_folder() -> Path:
    """Where the C++ sources lie."""
    return Path(__file__).parent


def cache_folder() -> Path:
    """``$LEADOUT_CACHE/native`` or ``~/.cache/leadout/native``."""
    root = os.environ.get("LEADOUT_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "leadout") / "native"


def processor() -> tuple[str, frozenset[str]]:
    """Model name and feature flags of the first processor; empty where Linux does not say."""
    path = Path("/proc/cpuinfo")
    fields: dict[str, str] = {}
    if path.exists():
        for line in path.read_text().split("\n\n")[0].splitlines():
            name, _, value = line.partition(":")
            fields[name.strip()] = value.strip()
    name = " ".join(fields.get(key, "") for key in ("vendor_id", "cpu family", "model", "stepping"))
    return f"{platform.machine()} {name}", frozenset(fields.get("flags", "").split())


def library_path(compiler: str) -> Path:
    """Where the library of these sources, this compiler and this processor lies or will lie."""
    name, features = processor()
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False, timeout=_SECONDS)
    digest = hashlib.sha256("\0".join([*_FLAGS, name, *sorted(features), version.stdout]).encode())
    for source in sorted(source_folder().glob("*.[ch]pp")):
        digest.update(source.name.encode() + source.read_bytes())
    return cache_folder() / f"{digest.hexdigest()[:24]}.so"


def build() -> Path:
    """The compiled library.

    Raises:
        BuildError: wrong processor, no compiler, or it failed.

    """
    _, features = processor()
    missing = sorted(NEEDED - features)
    if missing:
        raise BuildError(f"this processor lacks {', '.join(missing)}")
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        raise BuildError("no C++ compiler was found (g++, c++ or clang++)")
    try:
        path = library_path(compiler)
        if path.exists():
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            command = [compiler, *_FLAGS, str(source_folder() / "leadout.cpp"), "-o", str(made)]
            run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SECONDS)
            if run.returncode:
                lines = [line for line in run.stderr.splitlines() if "error" in line] or run.stderr.splitlines()
                raise BuildError(f"{compiler} failed: {lines[0] if lines else run.returncode}")
            os.replace(made, path)  # noqa: PTH105  # Path.replace is the same call, this one is the house's
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(str(error)) from error
    return path
