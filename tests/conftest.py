"""Eight virtual CPU devices for every test, set before jax starts."""

import os
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
# Unoptimised code halves the time to compile, which is most of what the tests of generation take.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
# XLA sizes its CPU thread pool by this: with fewer threads than devices a collective can wait for itself.
os.environ["NPROC"] = "16"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", tempfile.mkdtemp(prefix="jaxinfer-test-"))
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
