"""C kernels compiled on the user's machine at first use, beside the PyTorch versions that define them.

`library("ragged.c")` compiles that file of this folder with the system compiler, for exactly this processor, and loads
it; the result is kept in the user's cache folder under a key of everything it depends on (source, compiler, processor,
torch). The kernel shares torch's own OpenMP runtime, so that the process has one pool of threads: two pools on the
same cores stall each other. Whatever fails, the answer is None, one warning is logged, and PyTorch does the work.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
COMPILERS = ("cc", "gcc", "clang")
# Infinities and NaN keep their meaning (masked scores are -inf), so -ffast-math as a whole is out.
COMMON = ("-std=gnu11", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")
PROCESSORS = (("-march=native",), ("-mcpu=native",), ())
TIMEOUT_S = 120


@functools.cache
def library(source: str) -> ctypes.CDLL | None:
    """The C file `source` of this folder, compiled and loaded; None where that can't be done.

    The environment variable LONGSPAN_NATIVE=0 turns native code off. Answered once per process and file.
    """
    if os.environ.get("LONGSPAN_NATIVE", "1") == "0" or not supported():
        return None
    try:
        return _load(SOURCES / source)
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        log.warning("native kernel %s is not available, PyTorch is used instead: %s", source, error)
        return None


def supported() -> bool:
    """Native code is for x86-64 and 64-bit ARM on Linux and macOS."""
    return sys.platform in ("linux", "darwin") and platform.machine().lower() in ("x86_64", "amd64", "aarch64", "arm64")


def cache_folder() -> Path:
    """Where compiled kernels are kept: $LONGSPAN_CACHE, else $XDG_CACHE_HOME/longspan, else ~/.cache/longspan."""
    own, shared = os.environ.get("LONGSPAN_CACHE"), os.environ.get("XDG_CACHE_HOME")
    root = Path(own) if own else (Path(shared) if shared else Path.home() / ".cache") / "longspan"
    return root / "native"


def openmp_runtimes() -> list[Path]:
    """The OpenMP runtimes loaded into this process (where that can be seen), torch's own first."""
    torch_folder = Path(torch.__file__).parent
    maps = Path("/proc/self/maps")
    if maps.exists():
        lines = [line.split(maxsplit=5) for line in maps.read_text().splitlines()]
        loaded = {Path(fields[5]) for fields in lines if len(fields) > 5 and _is_openmp(Path(fields[5]).name)}
    else:
        loaded = {path for path in (torch_folder / "lib").glob("*.dylib") if _is_openmp(path.name)}
    return sorted(loaded, key=lambda path: (torch_folder.parent not in path.parents, str(path)))


def _is_openmp(name: str) -> bool:
    return name.startswith(("libgomp", "libomp", "libiomp5"))


def _load(source: Path) -> ctypes.CDLL:
    compilers = [path for path in map(shutil.which, COMPILERS) if path]
    if not compilers:
        raise RuntimeError(f"no C compiler found ({', '.join(COMPILERS)})")
    problems = []
    for compiler in dict.fromkeys(compilers):
        key = _key(source, compiler)
        kept = cache_folder() / f"{source.stem}-{key}.so"
        if kept.exists():
            try:
                return ctypes.CDLL(str(kept))
            except OSError as error:  # a damaged file: compile again
                problems.append(str(error))
        try:
            return _build(source, compiler, kept)
        except (OSError, subprocess.SubprocessError, RuntimeError) as error:
            problems.append(f"{compiler}: {error}")
    raise RuntimeError("; ".join(problems))


def _build(source: Path, compiler: str, kept: Path) -> ctypes.CDLL:
    """Compile beside the final place, load, then rename: a reader never sees half a file."""
    try:
        kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = Path(tempfile.mkdtemp(prefix="build-", dir=kept.parent))
    except OSError:  # no place to keep it: a private folder for this process alone
        folder = Path(tempfile.mkdtemp(prefix="longspan-"))
    problems = []
    try:
        for runtime in (*openmp_runtimes()[:1], None):  # with torch's threads, else without threads
            for processor in PROCESSORS:
                try:
                    built = _compile(source, compiler, folder, processor, runtime)
                    loaded = ctypes.CDLL(str(built))
                except (OSError, RuntimeError) as error:
                    problems.append(str(error))
                    continue
                if folder.parent == kept.parent:
                    with contextlib.suppress(OSError):  # loaded is loaded; the next process compiles again
                        os.replace(built, kept)
                return loaded
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    raise RuntimeError("; ".join(dict.fromkeys(problems)))


def _compile(source: Path, compiler: str, folder: Path, processor: tuple[str, ...], runtime: Path | None) -> Path:
    """Two steps, since a link step with -fopenmp would bring the compiler's own OpenMP runtime: a second pool."""
    pragmas: tuple[str, ...] = ()
    if runtime is not None:
        pragmas = ("-Xpreprocessor", "-fopenmp") if sys.platform == "darwin" else ("-fopenmp",)
    object_file, built = folder / f"{source.stem}.o", folder / f"{source.stem}.so"
    _run(compiler, *COMMON, *processor, *pragmas, "-c", str(source), "-o", str(object_file))
    _run(compiler, "-shared", str(object_file), "-o", str(built), *([str(runtime)] if runtime else []), "-lm")
    return built


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise RuntimeError(next((line for line in said if "error" in line), f"exit code {done.returncode}"))


def _key(source: Path, compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    texts = [path.read_text() for path in (source, *sorted(source.parent.glob("*.h")))]
    facts = (
        *texts, compiler, version.stdout, _processor(), torch.__version__,
        str(openmp_runtimes()[:1]), repr(COMMON), platform.platform(),
    )  # fmt: skip
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:20]


def _processor() -> str:
    """What -march=native looks at: a home folder may be shared by different machines."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() or platform.machine()
    wanted = ("flags", "Features", "model name", "CPU part", "CPU implementer")
    return "\n".join(sorted({line for line in info.read_text().splitlines() if line.startswith(wanted)}))
