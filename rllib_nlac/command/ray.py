"""Ray, as the command starts it."""

from __future__ import annotations

import logging

import ray

from rllib_nlac.command.terminal import VisibleFormatter


def start_ray(verbose: bool) -> None:
    """Starts Ray on this machine, or joins the cluster that RAY_ADDRESS names."""
    if not (ours := logging.getLogger("rllib_nlac")).handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(VisibleFormatter())
        ours.addHandler(handler)
    ray.init(
        include_dashboard=False, log_to_driver=verbose, logging_level=logging.INFO if verbose else logging.ERROR,
        ignore_reinit_error=True, configure_logging=verbose,
    )  # fmt: skip
