"""The import rule, read from the source; and what `import jaxinfer` may cost, measured."""

from __future__ import annotations

import ast
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("jaxinfer", "pallas_kernels", "meshes", "convert")

MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "pallas_kernels": (),
    "meshes": (),
    "jaxinfer.config": (),
    "jaxinfer.parameters": ("jaxinfer.config", "pallas_kernels.formats"),
    "convert": ("jaxinfer.config", "jaxinfer.parameters", "meshes", "pallas_kernels.formats"),
    "convert.__main__": ("jaxinfer", "meshes", "pallas_kernels.formats"),
    "jaxinfer": ("pallas_kernels", "meshes", "convert"),
}
"""Module or package → what of ours it may import besides its own package; the longest prefix counts."""
LEAVES = ("jaxinfer.config", "jaxinfer.parameters")
"""Modules that the rest of their package may import, but that may not import it back."""


def within(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def imports(source: str, module: str = "", is_package: bool = False) -> Iterator[str]:
    """Every module that the source imports, at any depth; `from a import b` is a.b where that is a module of ours."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parents = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parents, *([base] if base else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                ours = base.split(".")[0] in PACKAGES
                yield full if not ours or is_module(full) else base


def rule(module: str) -> str:
    return max((key for key in MAY_IMPORT if within(module, key)), key=len)


def violations(module: str, imported: str) -> bool:
    """Whether `module` importing `imported` breaks the rule."""
    top = imported.split(".")[0]
    if top in ("tests", "scripts"):
        return True
    if top not in PACKAGES:
        return False
    own = rule(module)
    if any(within(imported, allowed) for allowed in (own, *MAY_IMPORT[own])):
        return False
    return own in LEAVES or not within(imported, module.split(".")[0])


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("path", sources(), ids=module_name)
def test_import_rule(path: Path) -> None:
    module = module_name(path)
    broken = [
        name for name in imports(path.read_text(), module, path.name == "__init__.py") if violations(module, name)
    ]
    assert not broken, f"{module} may not import {broken}; it may import {MAY_IMPORT[rule(module)]}"


@pytest.mark.parametrize(
    ("module", "source", "broken"),
    [
        ("meshes.mesh", "from jaxinfer import config", True),
        ("meshes.mesh", "from meshes import rules", False),
        ("pallas_kernels.x.api", "def f():\n    import meshes", True),
        ("pallas_kernels.x.api", "from . import xla", False),
        ("jaxinfer.config", "from jaxinfer.outputs import Logprob", True),
        ("jaxinfer.config", "from .outputs import Logprob", True),
        ("jaxinfer.config.model", "from jaxinfer.outputs import Logprob", True),
        ("jaxinfer.config.engine", "from jaxinfer.config import model", False),
        ("jaxinfer.parameters", "from jaxinfer.config import ModelConfig", False),
        ("jaxinfer.parameters", "from jaxinfer import outputs", True),
        ("convert.load", "from jaxinfer import parameters", False),
        ("convert.load", "from jaxinfer import LLM", True),
        ("convert.load", "import jaxinfer.llm", True),
        ("convert.__main__", "from jaxinfer import llm", False),
        ("jaxinfer.llm", "import convert, meshes.mesh\nfrom pallas_kernels import formats", False),
        ("jaxinfer.llm", "from tests import tiny", True),
        ("jaxinfer.llm", "import scripts.bench", True),
    ],
)
def test_the_rule_is_read_right(module: str, source: str, broken: bool) -> None:
    assert any(violations(module, name) for name in imports(source, module)) is broken


def test_no_torch_and_no_triton() -> None:
    for path in sources():
        for name in imports(path.read_text(), module_name(path), path.name == "__init__.py"):
            assert name.split(".")[0] != "torch", f"{path} imports {name}"
            assert "triton" not in name, f"{path} imports {name}"


def test_private_jax_api_is_wrapped_once() -> None:
    users = [path for path in sources() if "jax._src" in path.read_text()]
    assert len(users) <= 1, f"jax._src is used in {users}; keep it in one wrapper"


def test_nothing_imports_scripts_but_their_own_tests() -> None:
    """And tests of what kernels compile to, which need the compiler that `scripts.aot` is."""
    for path in set((ROOT / "tests").rglob("*.py")) - set((ROOT / "tests" / "scripts").rglob("*.py")):
        names = [name for name in imports(path.read_text(), module_name(path)) if within(name, "scripts")]
        if path.name.endswith("_compiles.py"):
            names = [name for name in names if not within(name, "scripts.aot")]
        assert not names, path


LIGHT = {
    "import": "import jaxinfer",
    "cli": "from jaxinfer.cli import main; main(['--help'], standalone_mode=False)",
    "cli generate": "from jaxinfer.cli import main; main(['generate', '--help'], standalone_mode=False)",
}
HEAVY = ("jax", "transformers", "numpy", "flax", "orbax", "gguf", "tokenizers", "safetensors")


@pytest.mark.parametrize("name", LIGHT)
def test_light_start_imports_nothing_heavy(name: str) -> None:
    code = f"import sys\n{LIGHT[name]}\nprint([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", LIGHT)
def test_light_start_is_under_300_ms(name: str) -> None:
    """Of the processor's time, which is nearly all of it and does not depend on who else is busy."""
    times: list[float] = []
    while len(times) < 20 and min(times, default=1.0) >= 0.3:
        start = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        subprocess.run([sys.executable, "-c", LIGHT[name]], capture_output=True, check=True, cwd=ROOT)
        times.append(sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - start)
    assert min(times) < 0.3, times
