"""`python -m convert SRC DST`: a Hugging Face folder, a Hub id or a GGUF file → the native checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path

import click

from convert.checkpoint import open_checkpoint
from convert.hub import resolve
from jaxinfer.config import Quantization, WeightFormat

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
@click.option("--force", is_flag=True, help="Replace DST if it is a native checkpoint.")
def main(
    source: str,
    destination: Path,
    dtype: str | None,
    quantization: WeightFormat | None,
    group_size: int | None,
    zero_points: bool,
    force: bool,
) -> None:
    """Convert the model SRC into a native checkpoint in the folder DST.

    SRC is a folder with config.json and safetensors files, a .gguf file, or a Hugging Face Hub id (org/name). DST then
    loads faster, on any mesh, and holds the tokenizer too: give it to --model. To quantize, SRC may be native as well.
    """
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    if quantization != "int4" and (group_size is not None or zero_points):
        raise click.UsageError("--group-size and --zero-points need --quantization int4")
    try:
        stored = None if quantization is None else Quantization(quantization, group_size, not zero_points)
        checkpoint = open_checkpoint(resolve(source))
        # Imported late: --help answers without jax and transformers, and so do mistakes in SRC.
        from convert.native import check_destination, save_native
        from convert.tokenizer import load_tokenizer

        check_destination(destination, force)
        try:
            tokenizer = load_tokenizer(checkpoint.path)
        except FileNotFoundError as error:
            logger.warning("no tokenizer is saved, so only token ids will work: %s", error)
            tokenizer = None
        written = save_native(
            checkpoint, destination, dtype=dtype, quantization=stored, tokenizer=tokenizer, force=force
        )
    except (OSError, ValueError, ImportError) as error:
        raise click.ClickException(str(error)) from error
    size = sum(file.stat().st_size for file in written.rglob("*") if file.is_file())
    click.echo(
        f"{written}: {checkpoint.config.family}, {checkpoint.config.num_layers} layers, "
        f"{dtype or checkpoint.dtype}{f' and {quantization}' if quantization else ''}, {size / 1e6:.1f} MB, "
        f"{'with' if tokenizer else 'without'} tokenizer"
    )


if __name__ == "__main__":
    main(prog_name="python -m convert")
