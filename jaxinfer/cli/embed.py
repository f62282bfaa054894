"""`jaxinfer embed`: texts in, vectors out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import IO, Any

import click

from jaxinfer.cli.common import Command, lines_of, memory_options


@click.command(cls=Command)
@click.option("--model", required=True, help="A folder, a native checkpoint, or a Hugging Face id.")
@click.option("--prompt", "prompts", multiple=True, help="A text; may be repeated.")
@click.option(
    "--file", "--prompt-file", "file", type=click.File(encoding="utf-8-sig"), help="One text per line; - reads stdin."
)
@click.option(
    "--pooling",
    type=click.Choice(["cls", "mean", "last"]),
    help="Of the last hidden states: the first token's, the mean, or the last token's.  [default: the model's]",
)
@click.option(
    "--normalize/--no-normalize", default=None, help="Scale vectors to length 1.  [default: as the model was made for]"
)
@click.option("--truncate", is_flag=True, help="Leave out the end of a text that is too long, rather than stop.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A .npy file for all vectors, [texts, dimensions] in float32.  [default: print one JSON array per line]",
)
@memory_options
def embed(
    model: str,
    prompts: tuple[str, ...],
    file: IO[str] | None,
    pooling: str | None,
    normalize: bool | None,
    truncate: bool,
    output: Path | None,
    **memory: Any,
) -> None:
    """Turn texts into vectors, to search or compare them by.

    \b
    Examples:
      jaxinfer embed --model BAAI/bge-small-en-v1.5 --prompt "Why is the sky blue?"
      jaxinfer embed --model ./model --file lines.txt --output vectors.npy
      jaxinfer embed --model Qwen/Qwen3-Embedding-0.6B --file lines.txt --pooling last
    """
    lines = lines_of(file)
    while lines and not lines[-1].strip():
        del lines[-1]
    if blank := [str(number) for number, line in enumerate(lines, 1) if not line.strip()]:
        raise click.UsageError(f"lines of the file are blank: {', '.join(blank[:5])}; a vector is made of every line")
    texts = [*prompts, *lines]
    if not texts:
        raise click.UsageError("no text; give --prompt TEXT, or --file FILE with one text per line")
    if any(not text for text in prompts):
        raise click.UsageError("a text is empty; give it at least one character")
    if output is not None and output.suffix != ".npy":
        raise click.UsageError(f"--output is {output}; it is written as a .npy file, so name it so")
    if output is not None and not output.absolute().parent.is_dir():
        raise click.UsageError(f"--output is {output}, whose folder does not exist; make it first")

    import numpy as np

    from jaxinfer.compilation import enable_cache
    from jaxinfer.llm import LLM

    enable_cache()
    llm = LLM(model, task="embed", warm_up=False, progress=sys.stderr.isatty(), **memory)
    vectors = [out.embedding for out in llm.embed(texts, pooling=pooling, normalize=normalize, truncate=truncate)]
    if output is None:
        for vector in vectors:
            click.echo(json.dumps([float(f"{x:.9g}") for x in vector]))
    else:
        np.save(output, np.stack(vectors))
        click.echo(f"{output}: {len(vectors)} vectors of {vectors[0].size}")
