"""Compiling C kernels at first use: kept, shared, rebuilt, and quietly done without."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys

import pytest

from longspan.kernels import native

compiler = pytest.mark.skipif(
    not native.supported() or not any(map(shutil.which, native.COMPILERS)), reason="no C compiler"
)
SOURCE = '#include "answer.h"\nint answer(void) { return ANSWER; }\n'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A source folder of its own, an empty cache, and nothing remembered."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "answer.c").write_text(SOURCE)
    (sources / "answer.h").write_text("#define ANSWER 42\n")
    monkeypatch.setattr(native, "SOURCES", sources)
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LONGSPAN_NATIVE", raising=False)
    native.library.cache_clear()
    yield sources
    native.library.cache_clear()


def answer():
    native.library.cache_clear()
    library = native.library("answer.c")
    return None if library is None else library.answer()


@compiler
def test_compiled_once_and_kept(folder, monkeypatch):
    assert answer() == 42
    (kept,) = native.cache_folder().iterdir()  # no half-written file, no build folder is left
    assert kept.name.startswith("answer-") and kept.suffix == ".so"

    def never(*_):
        raise AssertionError("compiled again")

    monkeypatch.setattr(native, "_compile", never)
    assert answer() == 42


@compiler
def test_a_changed_source_or_header_is_compiled_again(folder):
    assert answer() == 42
    (folder / "answer.h").write_text("#define ANSWER 43\n")
    assert answer() == 43
    (folder / "answer.c").write_text(SOURCE.replace("ANSWER;", "ANSWER + 1;"))
    assert answer() == 44
    assert len(list(native.cache_folder().iterdir())) == 3


@compiler
def test_a_damaged_file_is_compiled_again(folder):
    for path in native.SOURCES.glob("*.c"):
        key = native._key(path, next(filter(None, map(shutil.which, native.COMPILERS))))
    native.cache_folder().mkdir(parents=True)
    (native.cache_folder() / f"answer-{key}.so").write_bytes(b"half a file")
    assert answer() == 42


@compiler
def test_a_cache_that_cannot_be_written_is_done_without(folder, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "file"))
    assert answer() == 42


def test_switched_off(folder, monkeypatch, caplog):
    monkeypatch.setenv("LONGSPAN_NATIVE", "0")
    assert answer() is None
    assert not caplog.records
    assert not native.cache_folder().exists()


def test_no_compiler_is_one_warning(folder, monkeypatch, caplog):
    monkeypatch.setattr(native, "supported", lambda: True)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert native.library("answer.c") is None
        assert native.library("answer.c") is None
    assert [record.getMessage() for record in caplog.records if "no C compiler" in record.getMessage()] == [
        caplog.records[0].getMessage()
    ]


@compiler
@pytest.mark.parametrize("broken", ["syntax error", "missing file"])
def test_what_does_not_compile_is_one_warning(folder, caplog, broken):
    if broken == "syntax error":
        (folder / "answer.c").write_text("int answer(void) { return }\n")
    else:
        (folder / "answer.c").unlink()
    with caplog.at_level(logging.WARNING):
        assert answer() is None
    (record,) = caplog.records
    assert "answer.c" in record.getMessage() and "PyTorch" in record.getMessage()
    assert not native.cache_folder().exists() or not list(native.cache_folder().iterdir())


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("LONGSPAN_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert native.cache_folder() == tmp_path / ".cache" / "longspan" / "native"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert native.cache_folder() == tmp_path / "x" / "longspan" / "native"
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "y"))
    assert native.cache_folder() == tmp_path / "y" / "native"


ONE_POOL = """
import torch
from longspan.kernels import decode_attend, native, ragged
before = native.openmp_runtimes()
kernel = ragged._kernel()
torch.set_num_threads(2)
x = torch.randn(1, 3, 2000, 64)
decode_attend(torch.randn(1, 9, 1, 64), None, x, x, 2000)
print(kernel is not None, len(before), native.openmp_runtimes() == before)
"""


@compiler
@pytest.mark.skipif(sys.platform != "linux", reason="loaded libraries are read from /proc")
def test_the_process_keeps_one_pool_of_threads():
    done = subprocess.run([sys.executable, "-c", ONE_POOL], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "1", "True"]
