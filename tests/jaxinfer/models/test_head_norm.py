"""A head whose rows are divided by their lengths, in every step or once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import ModelConfig
from jaxinfer.models.layers import Head
from jaxinfer.weights import fold_head_norm
from meshes import build_mesh
from pallas_kernels.formats import dequantize, quantize
from pallas_kernels.target import CPU


@pytest.mark.parametrize("form", [None, "int8"])
def test_folded_or_not_it_is_the_same(form):
    config = ModelConfig("baichuan", 97, 32, 1, 4, 4, 8, 48, 128, None, head_norm=True, vocab_padding=3)
    rng = np.random.default_rng(0)
    plain = rng.standard_normal((32, 100)).astype(np.float32) * rng.uniform(0.1, 9.0, 100).astype(np.float32)
    plain[:, 97:] = 0.0  # what pads the vocabulary
    head = jnp.asarray(plain) if form is None else quantize(jnp.asarray(plain), form, contract=1)
    stored = plain if form is None else np.asarray(dequantize(head, jnp.float32)).T
    x = rng.standard_normal((3, 32)).astype(np.float32)
    lengths = np.sqrt((stored * stored).sum(0))
    want = x @ stored / np.where(lengths > 0, lengths, 1.0)
    mesh = build_mesh(devices=jax.devices()[:1])
    every_step = Head(config, {"weight": head}, mesh).logits(jnp.asarray(x), CPU)
    weights, folded = fold_head_norm({"head": {"weight": head}}, config)
    assert not folded.head_norm
    once = Head(folded, weights["head"], mesh).logits(jnp.asarray(x), CPU)
    np.testing.assert_allclose(every_step, want, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(once, want, rtol=2e-5, atol=2e-5)
