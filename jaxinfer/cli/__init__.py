"""The command line. Commands import what they need when they run, so that `jaxinfer --help` answers at once."""

from __future__ import annotations

import os

import click

from jaxinfer import __version__
from jaxinfer.cli.bench import bench
from jaxinfer.cli.cuda import skip_unusable_cuda
from jaxinfer.cli.demo import fetch_demo
from jaxinfer.cli.embed import embed
from jaxinfer.cli.env import env
from jaxinfer.cli.generate import generate
from jaxinfer.cli.info import info

__all__ = ["main"]


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="A first run:  jaxinfer generate --model $(jaxinfer fetch-demo) --chat --prompt 'Why is the sky blue?'",
)
@click.version_option(__version__, prog_name="jaxinfer")
def main() -> None:
    """Run large language models in JAX, on one device or a mesh of them.

    Results go to stdout, progress and logs to stderr. Every command explains itself: jaxinfer COMMAND --help
    """
    skip_unusable_cuda(os.environ)


for command in (generate, embed, info, bench, env, fetch_demo):
    main.add_command(command)
