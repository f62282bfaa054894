"""What the commands share: how errors and interrupts end them, and the options that shape an `LLM`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import IO, Any

import click

from jaxinfer.cli.interrupt import interruptible

USER_ERRORS = (ValueError, OSError, ImportError)
"""Errors whose message says what to do: a bad argument, a missing file, an extra that is not installed."""
INTERRUPTED = 130
"""Exit status of a command ended by Ctrl-C: 128 + SIGINT."""

DTYPES = click.Choice(["auto", "float32", "bfloat16", "float16"])
WEIGHTS = click.Choice(["int8", "int4", "fp8"])
CACHE_DTYPES = click.Choice(["auto", "int8", "fp8"])

type Decorator = Callable[[Callable[..., None]], Callable[..., None]]


class Command(click.Command):
    """A command with `--debug`: without it, a user error prints one line and Ctrl-C prints nothing more."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        text = "Log details to stderr, and show tracebacks."
        self.params.append(click.Option(["--debug"], is_flag=True, expose_value=False, callback=_set_up, help=text))
        self.context_settings.setdefault("show_default", True)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with interruptible():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("Interrupted", err=True)
            ctx.exit(INTERRUPTED)
        except USER_ERRORS as error:
            if ctx.meta["debug"] or isinstance(error, BrokenPipeError):
                raise
            raise click.ClickException(str(error)) from error


def _set_up(ctx: click.Context, _: click.Parameter, debug: bool) -> None:
    ctx.meta["debug"] = debug
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")  # to stderr
    for package in ("jaxinfer", "convert", "meshes", "pallas_kernels"):
        logging.getLogger(package).setLevel(logging.DEBUG if debug else logging.WARNING)


def options(*decorators: Any) -> Decorator:
    """The click options as one decorator; `--help` lists them in this order."""

    def apply(function: Callable[..., None]) -> Callable[..., None]:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


def lines_of(file: IO[str] | None) -> list[str]:
    """Of a file, without their ends; none without a file. Raises click.UsageError if it is no UTF-8."""
    try:
        return [line.rstrip("\n") for line in file or ()]
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{getattr(file, 'name', 'the file')} is no UTF-8 text: {error}") from error


memory_options = options(
    click.option(
        "--dtype", type=DTYPES, default="auto", help="Of weights and activations; auto: float32 on CPU, else bf16."
    ),
    click.option("--quantization", type=WEIGHTS, help="Of the projections, while loading.  [default: as stored]"),
    click.option(
        "--quantize-activations", is_flag=True, help="Round activations, too, to the projections' int8 or fp8."
    ),
    click.option("--tensor-parallel-size", type=int, default=1, help="Devices that share every layer."),
    click.option("--max-model-len", type=int, help="Longest prompt and output in tokens.  [default: the model's]"),
    click.option("--max-num-seqs", type=int, default=64, help="Sequences that run at once."),
    click.option("--max-num-batched-tokens", type=int, default=2048, help="Tokens that one step takes."),
    click.option("--page-size", type=int, default=64, help="Tokens of a page of the KV cache; a power of two."),
    click.option("--num-pages", type=int, help="Pages of the KV cache.  [default: what memory allows]"),
    click.option("--kv-cache-dtype", type=CACHE_DTYPES, default="auto", help="Of keys and values; auto: as --dtype."),
    click.option("--memory-fraction", type=float, default=0.9, help="Share of device memory that may be used."),
)
"""Options that go to `LLM` under their own names."""
