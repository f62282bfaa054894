"""`python -m convert SRC DST`: a Hugging Face folder, a Hub id or a GGUF file → the native checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path

import click

from convert.checkpoint import open_checkpoint
from convert.hub import resolve

logger = logging.getLogger(__name__)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST", type=click.Path(path_type=Path))
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="What the weights are stored in; by default the checkpoint's own, float32 for a quantized GGUF.",
)
@click.option("--force", is_flag=True, help="Replace DST if it is a native checkpoint.")
def main(source: str, destination: Path, dtype: str | None, force: bool) -> None:
    """Convert the model SRC into a native checkpoint in the folder DST.

    SRC is a folder with config.json and safetensors files, a .gguf file, or a Hugging Face Hub id (org/name). DST then
    loads faster, on any mesh, and holds the tokenizer too: give it to --model.
    """
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    try:
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
        written = save_native(checkpoint, destination, dtype=dtype, tokenizer=tokenizer, force=force)
    except (OSError, ValueError, ImportError) as error:
        raise click.ClickException(str(error)) from error
    size = sum(file.stat().st_size for file in written.rglob("*") if file.is_file())
    click.echo(
        f"{written}: {checkpoint.config.family}, {checkpoint.config.num_layers} layers, "
        f"{dtype or checkpoint.dtype}, {size / 1e6:.1f} MB, {'with' if tokenizer else 'without'} tokenizer"
    )


if __name__ == "__main__":
    main(prog_name="python -m convert")
