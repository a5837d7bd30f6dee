"""The EnvRunner under RLlib's own algorithms: its weights arrive by RLlib's sync, and its engine is in its process."""

from __future__ import annotations

import gc
import logging
from typing import Any

import ray
from ray.rllib.core import COMPONENT_RL_MODULE, DEFAULT_MODULE_ID
from ray.rllib.utils import force_list
from ray.rllib.utils.annotations import override
from ray.rllib.utils.metrics import WEIGHTS_SEQ_NO

from rllib_nlac.engine.make import local_engine
from rllib_nlac.engine.shared import require_finite
from rllib_nlac.sampling.env_runner import TextEnvRunner
from rllib_nlac.types import Weights

logger = logging.getLogger(__name__)


class StockTextEnvRunner(TextEnvRunner):
    """Takes weights from ``set_state`` and starts an engine at its first ``sample``."""

    @override(TextEnvRunner)
    def __init__(self, *, config: Any, **kwargs: Any) -> None:
        self._weights_version = 0
        self._weights: dict[str, Any] | None = None
        # Asynchronous algorithms of RLlib put a handle here; their runners fetch new weights from it themselves.
        self._env_runner_state_server: Any = None
        super().__init__(config=config, **kwargs)

    @override(TextEnvRunner)
    def prepare(self) -> None:
        self._fetch_weights()
        self._serve_own_weights()

    @override(TextEnvRunner)
    def get_state(self, components: Any = None, *, not_components: Any = None, **kwargs: Any) -> dict[str, Any]:
        """Also the weights: without them a restarted runner has no engine."""
        state = super().get_state(components, not_components=not_components, **kwargs)
        # RLlib asks for everything with no arguments; a checkpoint says what it leaves out, and has them from the learner.
        is_wanted = COMPONENT_RL_MODULE in force_list(components) or (components is None and not_components is None)
        if self._weights is not None and is_wanted:
            state |= {COMPONENT_RL_MODULE: {DEFAULT_MODULE_ID: self._weights}, WEIGHTS_SEQ_NO: self._weights_version}
        return state

    @override(TextEnvRunner)
    def set_state(self, state: dict[str, Any]) -> None:
        if COMPONENT_RL_MODULE in state:
            self._take_weights(state[COMPONENT_RL_MODULE], state.get(WEIGHTS_SEQ_NO, 0))
        super().set_state(state)

    @override(TextEnvRunner)
    def stop(self) -> None:
        super().stop()
        if self._weights is not None:
            self.engine = self.player.speaker = self._weights = None  # its engine ends with the last runner that holds it
            gc.collect()

    def _fetch_weights(self) -> None:
        """Asks the state server of an asynchronous algorithm for newer weights; without an answer the old ones play on."""
        if self._env_runner_state_server is None:
            return
        try:
            state = ray.get(self._env_runner_state_server.pull_if_newer.remote(self._weights_version))
        except ray.exceptions.RayError as error:
            self.player.count("weight_fetch_failures", 1)
            logger.warning("no newer weights could be fetched: %s: %s", type(error).__name__, error)
            return
        if state is not None:
            self.set_state(state)

    def _take_weights(self, weights: Any, version: int) -> None:
        """Weights from RLlib's own sync; of an older version than those here they are ignored, of version 0 never."""
        weights = ray.get(weights) if isinstance(weights, ray.ObjectRef) else weights
        weights = weights.get(DEFAULT_MODULE_ID, weights)
        if weights and (version == 0 or version > self._weights_version):
            self._weights, self._weights_version = weights, max(version, self._weights_version)

    def forget_version(self) -> None:
        """Whatever weights come next are taken."""
        self._weights_version = 0

    def _serve_own_weights(self) -> None:
        """Puts the weights of RLlib's last sync into this process's engine, which others here may have used in between."""
        if self._weights is not None:
            engine = local_engine(self.config.engine_spec, self.chat)
            if not engine.holds(self._weights):
                require_finite(self._weights, "the weights that RLlib's sync brought")
                engine.set_weights(Weights.POLICY, self._weights_version, self._weights)
            self.engine = engine
