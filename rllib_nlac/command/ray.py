"""Ray, as the command starts it."""

from __future__ import annotations

import logging

import ray

from rllib_nlac.command.terminal import VisibleHandler, terminal

# Ray says at every start that it asks for a token. It is right to: also on this machine alone, whoever else may log in to it
# could run code in a cluster without one. Where there is none Ray says so, too, and that is news.
AUTHENTICATION = "ray._private.authentication.authentication_token_setup"


def start_ray(verbose: bool) -> None:
    """Starts Ray on this machine, or joins the cluster that RAY_ADDRESS names."""
    if not (ours := logging.getLogger("rllib_nlac")).handlers:
        ours.addHandler(VisibleHandler(terminal))
    logging.getLogger(AUTHENTICATION).addFilter(_is_news)
    ray.init(
        include_dashboard=False,
        log_to_driver=verbose,
        logging_level=logging.INFO if verbose else logging.ERROR,
        ignore_reinit_error=True,
        configure_logging=verbose,
    )


def _is_news(record: logging.LogRecord) -> bool:
    """False for what Ray says of its authentication where it is as it should be."""
    return not record.getMessage().startswith("Token authentication is enabled")
