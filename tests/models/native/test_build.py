from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from leadout.models.native import build as native_build
from leadout.models.native.build import BuildError, build, library_path, source_folder
from leadout.models.native.library import native_library


@pytest.fixture
def fresh_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache and a library that is looked up anew, before and after."""
    monkeypatch.setenv("LEADOUT_CACHE", str(tmp_path))
    monkeypatch.delenv("LEADOUT_NATIVE", raising=False)
    monkeypatch.setattr(native_build, "processor", lambda: ("test", frozenset(native_build.NEEDED)))
    monkeypatch.setattr("leadout.models.native.library.native_library", native_library.__wrapped__)
    return tmp_path


def test_a_failing_compiler_is_one_line_in_the_log(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = fresh_cache / "broken"
    compiler.write_text("#!/bin/sh\necho 'x.cpp:1: error: out of luck' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert native_library.__wrapped__() is None
    assert [record.getMessage() for record in caplog.records] == [
        f"native kernels are off, the slower PyTorch operators are used: {compiler} failed: x.cpp:1: error: out of luck"
    ]


def test_no_compiler_is_said(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BuildError, match=r"no C\+\+ compiler was found"):
        build()


def test_a_processor_without_the_instructions_is_named(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build, "processor", lambda: ("old", frozenset({"avx512f", "avx512bw"})))
    with pytest.raises(BuildError, match="lacks avx512_bf16, avx512dq, avx512vl"):
        build()


def test_the_environment_turns_the_kernels_off(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LEADOUT_NATIVE", "0")
    assert native_library.__wrapped__() is None
    assert "LEADOUT_NATIVE=0" in caplog.text


def test_processes_that_race_leave_one_whole_library(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = fresh_cache / "copies"
    compiler.write_text(
        '#!/bin/sh\nif [ "$1" = --version ]; then echo 1; exit; fi\n'
        'while [ "$1" != -o ]; do shift; done\nprintf whole > "$2"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    code = (
        "from leadout.models.native import build as b\n"
        "b.processor = lambda: ('test', frozenset(b.NEEDED))\n"
        "print(b.build())"
    )
    racers = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    paths = {racer.communicate()[0].strip() for racer in racers}
    assert paths == {str(library_path(str(compiler)))}
    assert [path.read_text() for path in (fresh_cache / "native").iterdir()] == ["whole"]


def test_the_library_is_named_after_its_sources(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = library_path("true")
    copied = tmp_path / "sources"
    copied.mkdir()
    for source in source_folder().glob("*.[ch]pp"):
        (copied / source.name).write_text(source.read_text())
    monkeypatch.setattr(native_build, "source_folder", lambda: copied)
    assert library_path("true") == before
    (copied / "leadout.cpp").write_text("// changed")
    assert library_path("true") != before
