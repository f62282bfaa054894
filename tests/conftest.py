"""Eight virtual CPU devices for every test, set before jax starts."""

import gc
import os
import sys
import tempfile

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
# Unoptimised code halves the time to compile, which is most of what the tests of generation take.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
# XLA sizes its CPU thread pool by this: with fewer threads than devices a collective can wait for itself.
os.environ["NPROC"] = "16"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", tempfile.mkdtemp(prefix="jaxinfer-test-"))
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"


@pytest.fixture(scope="module", autouse=True)
def _programs_go_with_their_module():
    """Every compiled program maps memory: those of all tests together pass what Linux allows a process (65530 maps)."""
    yield
    if jax := sys.modules.get("jax"):
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def no_new_families():
    """Families that a test registers go with it."""
    from convert.families import FAMILIES

    before = dict(FAMILIES)
    yield
    FAMILIES.clear()
    FAMILIES.update(before)
