"""``python -m rllib_nlac.command``: the ``rllib`` command, wherever it is not on the path."""

from rllib_nlac.command.cli import app

app()
