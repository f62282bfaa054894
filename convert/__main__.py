"""`python -m convert SRC DST`: a Hugging Face folder, a Hub id or a GGUF file → the native checkpoint."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import click

from convert.checkpoint import Checkpoint, open_checkpoint
from convert.hub import resolve
from jaxinfer.config import ParallelConfig, Quantization, WeightFormat

logger = logging.getLogger(__name__)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST", type=click.Path(path_type=Path))
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="What the weights are stored in; by default the checkpoint's own, float32 for a quantized GGUF.",
)
@click.option(
    "--quantization",
    type=click.Choice(["int8", "int4", "fp8"]),
    help="Store the projections in 8 or 4 bits; embedding, norms and biases keep --dtype.",
)
@click.option(
    "--group-size", type=int, help="int4: inputs that share a scale.  [default: the largest of 128, 64, 32 that fits]"
)
@click.option("--zero-points", is_flag=True, help="int4: a zero point beside every scale.")
@click.option(
    "--calibrate",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="int4: round so that the model stays close on this text, some thousand tokens of it.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["native", "safetensors", "stablehlo"]),
    default="native",
    help="safetensors: a Hugging Face folder, whose tensors are those of SRC bit for bit unless --dtype is given. "
    "stablehlo: the forward pass as a program, without weights.",
)
@click.option("--length", type=click.IntRange(1), help="stablehlo: tokens that the program takes.  [default: 128]")
@click.option(
    "--mesh",
    callback=lambda context, parameter, value: _parallel(value),
    metavar="AXIS=SIZE",
    help="A mesh that is to load DST, such as tensor=8: what does not divide there is an error now. DST is the same.",
)
@click.option("--verify", is_flag=True, help="Read DST again and compare it with SRC: all tensors, and a forward pass.")
@click.option("--dry-run", is_flag=True, help="Write nothing; print what becomes of which tensors, and sizes.")
@click.option("--force", is_flag=True, help="Replace DST if it is a native checkpoint.")
def main(
    source: str,
    destination: Path,
    dtype: str | None,
    quantization: WeightFormat | None,
    group_size: int | None,
    zero_points: bool,
    calibrate: Path | None,
    form: Literal["native", "safetensors", "stablehlo"],
    length: int | None,
    mesh: ParallelConfig | None,
    verify: bool,
    dry_run: bool,
    force: bool,
) -> None:
    """Convert the model SRC into a native checkpoint in the folder DST, or a Hugging Face folder.

    SRC is a folder with config.json and safetensors or pytorch_model.bin files, an adapter's or Megatron-LM's, a .gguf
    file, or a Hugging Face Hub id (org/name). DST then loads faster, on any mesh, and holds the tokenizer too: give it
    to --model. To quantize, SRC may be native as well. What was interrupted goes on where it was when run again.

    \b
    Examples:
      python -m convert org/name ./native --dtype bfloat16
      python -m convert ./model ./native --quantization int8 --mesh tensor=8 --dry-run
      python -m convert ./model ./int4 --quantization int4 --calibrate text.txt --verify
      python -m convert ./adapter ./merged --format safetensors
      python -m convert ./model ./program --format stablehlo --length 128
    """
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    if quantization != "int4" and (group_size is not None or zero_points):
        raise click.UsageError("--group-size and --zero-points need --quantization int4")
    if quantization != "int4" and calibrate is not None:
        raise click.UsageError("--calibrate needs --quantization int4: 8 bits are close enough without")
    if quantization is not None and form != "native":
        raise click.UsageError("--quantization needs --format native")
    if form == "stablehlo" and (verify or dry_run):
        raise click.UsageError("--verify and --dry-run are about weights, which --format stablehlo does not write")
    if form != "stablehlo" and length is not None:
        raise click.UsageError("--length needs --format stablehlo")
    if dry_run and verify:
        raise click.UsageError("--dry-run writes nothing, so there is nothing to --verify")
    try:
        stored = None if quantization is None else Quantization(quantization, group_size, not zero_points)
        checkpoint = open_checkpoint(resolve(source))
        # Imported late: --help answers without jax and transformers, and so do mistakes in SRC.
        from convert.destination import check_destination
        from convert.export import plan_safetensors, save_safetensors
        from convert.plan import plan

        check_destination(destination, force, checkpoint)
        if mesh is not None:
            from jaxinfer.weights import check_fits

            check_fits(checkpoint.config, mesh, checkpoint.quantization if stored is None else stored)
        if dry_run:
            native = form == "native"
            for line in plan(checkpoint, dtype, stored) if native else plan_safetensors(checkpoint, dtype):
                click.echo(line)
            return
        if form == "stablehlo":
            from jaxinfer.export import export_forward

            written = export_forward(checkpoint, destination, length=length or 128, dtype=dtype, force=force)
            click.echo(f"{written}: the forward pass of {checkpoint.config.family}, {_megabytes(written)}")
            return
        with _calibrated(checkpoint, calibrate, stored, dtype, destination) as ready:
            if form == "safetensors":
                written = save_safetensors(checkpoint, destination, dtype=dtype, force=force)
                click.echo(f"{written}: {checkpoint.config.family}, {_megabytes(written)}")
            else:
                ready_of = "" if calibrate is None else hashlib.sha256(calibrate.read_bytes()).hexdigest()
                written = _save_native(checkpoint, destination, dtype, stored, ready, ready_of, force)
            if verify and not _verified(checkpoint, written, ready):
                raise SystemExit(1)
    except (OSError, ValueError, ImportError) as error:
        raise click.ClickException(str(error)) from error


def _parallel(text: str | None) -> ParallelConfig | None:
    """`tensor=8`, or several of these with commas between."""
    if text is None:
        return None
    axes = [field.name for field in dataclasses.fields(ParallelConfig)]
    sizes = dict(re.findall(r"(\w+)=(\d+)(?:,|$)", text))
    if ",".join(f"{axis}={size}" for axis, size in sizes.items()) != text or not sizes.keys() <= set(axes):
        raise click.BadParameter(f"{text!r} is no mesh; give AXIS=SIZE, such as tensor=8, of {', '.join(axes)}")
    try:
        return ParallelConfig(**{axis: int(size) for axis, size in sizes.items()})
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@contextmanager
def _calibrated(
    checkpoint: Checkpoint, text: Path | None, quantization: Quantization | None, dtype: str | None, destination: Path
) -> Iterator[Mapping[str, Any]]:
    """Path → calibrated weight; nothing without a text."""
    if text is None or quantization is None:
        yield {}
        return
    from jaxinfer.calibration import calibrated

    with calibrated(checkpoint, text, quantization, dtype=dtype, beside=destination) as ready:
        yield ready


def _save_native(
    checkpoint: Checkpoint,
    destination: Path,
    dtype: str | None,
    quantization: Quantization | None,
    ready: Mapping[str, Any],
    ready_of: str,
    force: bool,
) -> Path:
    """Says what it wrote."""
    from convert.native import save_native
    from convert.tokenizer import load_tokenizer

    try:
        tokenizer = load_tokenizer(checkpoint.path)
    except FileNotFoundError as error:
        logger.warning("no tokenizer is saved, so only token ids will work: %s", error)
        tokenizer = None
    made: dict[str, Any] = {"quantization": quantization, "ready": ready, "ready_of": ready_of}
    written = save_native(checkpoint, destination, force=force, dtype=dtype, tokenizer=tokenizer, **made)
    kept = quantization or checkpoint.quantization
    click.echo(
        f"{written}: {checkpoint.config.family}, {checkpoint.config.num_layers} layers, "
        f"{dtype or checkpoint.dtype}{f' and {kept.format}' if kept else ''}, {_megabytes(written)}, "
        f"{'with' if tokenizer else 'without'} tokenizer"
    )
    return written


def _verified(checkpoint: Checkpoint, written: Path, ready: Mapping[str, Any]) -> bool:
    """Whether what was written is what was to be; prints how it compares."""
    from jaxinfer.verify import verify

    report = verify(checkpoint, open_checkpoint(written), ready)
    for line in report.lines():
        click.echo(line)
    return not report.mismatches


def _megabytes(folder: Path) -> str:
    return f"{sum(file.stat().st_size for file in folder.rglob('*') if file.is_file()) / 1e6:.1f} MB"


if __name__ == "__main__":
    main(prog_name="python -m convert")
