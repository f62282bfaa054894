"""`jaxinfer info`: what a checkpoint is and what it needs, read from its header alone; or which kernels run here."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import TYPE_CHECKING, Any

import click

from jaxinfer.cli.common import Command

if TYPE_CHECKING:
    from jaxinfer.config import ModelConfig, Quantization

MOST_DEVICES = 8
"""The table stops at one host's devices; larger sizes that fit are still listed."""
FIT_DTYPE = "bfloat16"


@click.command(cls=Command)
@click.argument("path", required=False)
@click.option("--kernels", is_flag=True, help="Instead of a checkpoint: which kernels run on this machine, and why.")
@click.option("--gpu", metavar="NAME", help="With --kernels: on this GPU instead, as h200.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def info(path: str | None, kernels: bool, gpu: str | None, as_json: bool) -> None:
    """Describe the checkpoint at PATH (or a Hugging Face id): parameters, bytes, and what fits where.

    \b
    Examples:
      jaxinfer info ./Llama-3.1-8B-Instruct
      jaxinfer info "$(jaxinfer fetch-demo)" --json
      jaxinfer info --kernels
    """
    if (path is None) != kernels:
        raise click.UsageError("Name either a PATH or --kernels.")
    if gpu is not None and not kernels:
        raise click.UsageError("--gpu goes with --kernels.")
    report, lines = _kernels(gpu) if path is None else _checkpoint(path)
    click.echo(json.dumps(report) if as_json else "\n".join(lines))


def _checkpoint(path: str) -> tuple[dict[str, Any], list[str]]:
    import convert

    checkpoint = convert.open_checkpoint(convert.resolve(path))
    quantization = checkpoint.quantization
    report = describe(checkpoint.config, quantization)
    report |= {
        "format": checkpoint.format,
        "stored_dtype": str(checkpoint.dtype),
        "quantization": None if quantization is None else dataclasses.asdict(quantization),
    }
    return report, _lines(checkpoint.config, report)


def _kernels(gpu: str | None) -> tuple[dict[str, Any], list[str]]:
    """Each operation in the shapes of Llama-3-8B: the kernel (mosaic) or plain JAX (xla), and why not the kernel."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # asking must not take the memory
    import jax

    from pallas_kernels import ops, target

    if gpu is None:
        device = jax.devices()[0]
        name, kind = device.device_kind, target.Target.of(device)
    elif gpu in target.GPUS:
        name, kind = gpu, target.GPUS[gpu]
    else:
        raise ValueError(f"{gpu!r} is not a GPU known here; there are: {', '.join(target.GPUS)}")
    rows = [{"shapes": shapes, **dataclasses.asdict(made)} for shapes, made in ops.decisions(kind)]
    lines = [f"On {name}, {kind.described}, with a layer of Llama-3-8B:"]
    lines.append(f"{'operation':<17}{'of':<27}{'runs':<8}why not the kernel (mosaic)")
    lines += [
        f"{row['op']:<17}{row['shapes']:<27}{row['implementation']:<8}{row['obstacle'] or ''}".rstrip() for row in rows
    ]
    return {"device": name, "platform": kind.platform, "kernels": rows}, lines


def describe(config: ModelConfig, quantization: Quantization | None = None) -> dict[str, Any]:
    """All numbers of the report as plain values; bytes are bytes, `device_gb` is 10**9 bytes.

    quantization: as the checkpoint stores its projections.
    """
    from jaxinfer import parameters, sizes

    fitting = parameters.fitting_tensor_sizes(config)
    fits = (
        []
        if config.headless
        else [  # nothing is cached
            sizes.fit(config, memory, tensor, FIT_DTYPE, quantization)
            for tensor in fitting
            if tensor <= MOST_DEVICES
            for memory in sizes.DEVICE_GB
        ]
    )
    return {
        "config": config.to_dict(),
        "parameters": parameters.count(config),
        "weight_bytes": {dtype: sizes.weight_bytes(config, dtype, quantization) for dtype in sizes.DTYPE_BYTES},
        "kv_bytes_per_token": {dtype: sizes.kv_bytes_per_token(config, dtype) for dtype in sizes.DTYPE_BYTES},
        "state_bytes_per_sequence": config.state_bytes,
        "tensor_parallel_sizes": fitting,
        "fits": [dataclasses.asdict(fit) for fit in fits],
    }


def _positions(config: ModelConfig) -> str:
    if config.rope is not None:
        return f"rope {config.rope.kind}, base {config.rope.theta:g}"
    return "learned positions" if config.learned_positions else "ALiBi"


def _lines(config: ModelConfig, report: dict[str, Any]) -> list[str]:
    c = config
    windowed = [window for window in c.windows if window is not None]
    weights, cache = report["weight_bytes"], report["kv_bytes_per_token"]
    lines = [
        f"architecture    {c.family}, stored as {report['format']} in {_stored(report)}",
        f"layers          {c.num_layers}, hidden {c.hidden_size}, MLP {c.mlp_size}",
        f"heads           {c.num_heads} query, {c.num_kv_heads} key/value, of {c.head_dim}",
        f"vocabulary      {c.vocab_size}{', the head tied to the embedding' if c.tied_head and not c.headless else ''}",
        f"context         {c.max_position} tokens, {_positions(c)}",
    ]
    if windowed:
        lines.append(f"windows         {len(windowed)} of {c.num_layers} layers look back {max(windowed)} tokens")
    if c.recurrent_layers:
        kept = f"keep {size(c.state_bytes)} a sequence, whatever its length"
        lines.append(f"recurrent       {len(c.recurrent_layers)} of {c.num_layers} layers {kept}")
    lines += [
        f"parameters      {report['parameters']:,}",
        f"weights         {', '.join(f'{size(n)} {dtype}' for dtype, n in weights.items())}{_beside(report)}",
        f"cache per token {', '.join(f'{size(n)} {dtype}' for dtype, n in cache.items())}",
        f"tensor parallel {', '.join(map(str, report['tensor_parallel_sizes']))} devices fit",
    ]
    if not report["fits"]:
        return [*lines, "task            embeds text, and generates none: no cache is kept"]
    lines += ["", f"Tokens of cache beside the weights, {FIT_DTYPE}, at the default memory fraction:"]
    return lines + _table(report["fits"])


def _beside(report: dict[str, Any]) -> str:
    quantization = report["quantization"]
    return f", {_which(quantization)} in {quantization['format']}" if quantization else ""


def _which(quantization: dict[str, Any]) -> str:
    return "projections" if quantization["layers"] else "projections of experts"


def _stored(report: dict[str, Any]) -> str:
    quantization = report["quantization"]
    if quantization is None:
        return str(report["stored_dtype"])
    groups = f", groups of {quantization['group_size']}" if quantization["group_size"] else ""
    return f"{report['stored_dtype']}, {_which(quantization)} in {quantization['format']}{groups}"


def _table(fits: list[dict[str, Any]]) -> list[str]:
    memories = sorted({fit["device_gb"] for fit in fits})
    lines = ["devices" + "".join(f"{f'{memory} GB each':>16}" for memory in memories)]
    for tensor in sorted({fit["tensor_parallel_size"] for fit in fits}):
        row = [fit for fit in fits if fit["tensor_parallel_size"] == tensor]
        cells = [f"{fit['cache_tokens']:,}" if fit["cache_tokens"] else "too small" for fit in row]
        lines.append(f"{tensor:<7}" + "".join(f"{cell:>16}" for cell in cells))
    return lines


def size(count: float) -> str:
    """Bytes in decimal units: 269 MB, 22.5 kB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.4g} {unit}"
    return f"{count:.0f} B"
