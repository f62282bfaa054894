"""Eight virtual CPU devices for every test, set before jax starts."""

import gc
import logging
import os
import sys
import tempfile
from pathlib import Path

import hypothesis
import pytest

# How long an example takes depends on who shares the machine.
hypothesis.settings.register_profile("jaxinfer", deadline=None)
hypothesis.settings.load_profile("jaxinfer")

os.environ["JAX_PLATFORMS"] = "cpu"
# Unoptimised code halves the time to compile, which is most of what the tests of generation take.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
# XLA sizes its CPU thread pool by this: with fewer threads than devices a collective can wait for itself.
os.environ["NPROC"] = "16"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", tempfile.mkdtemp(prefix="jaxinfer-test-"))
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"


def pytest_collection_modifyitems(items):
    """A test that is named by an address has another name in every process, and none of them would run anything."""
    if named := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"give this test an id of its own: {named[0]}")


@pytest.fixture(scope="module", autouse=True)
def _programs_go_with_their_module():
    """Every compiled program maps memory: those of all tests together pass what Linux allows a process (65530 maps)."""
    yield
    if jax := sys.modules.get("jax"):
        jax.clear_caches()
        gc.collect()


@pytest.fixture(autouse=True)
def _the_process_stays_as_it_was():
    """What code under test sets for its process is not the next test's; which tests share one differs by the run."""
    environment, folder = dict(os.environ), Path.cwd()
    loggers = {name: logging.getLogger(name).level for name in ("", "jaxinfer", "convert", "pallas_kernels")}
    yield
    # Only what differs: changing the environment while a thread of XLA reads it can crash the process.
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    for name, value in environment.items():
        if name != "PYTEST_CURRENT_TEST" and os.environ.get(name) != value:
            os.environ[name] = value
    os.chdir(folder)
    for name, level in loggers.items():
        logging.getLogger(name).setLevel(level)


@pytest.fixture
def no_new_families():
    """Families that a test registers go with it."""
    from convert.families import FAMILIES

    before = dict(FAMILIES)
    yield
    FAMILIES.clear()
    FAMILIES.update(before)
