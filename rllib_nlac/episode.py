"""How a text episode is written into RLlib's ``SingleAgentEpisode``: what stands where, by functions that know the keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rllib_nlac.types import ANSWER, TOOLS, ActionForm, Generation, Message

GENERATION, MESSAGES = "generation", "messages"  # keys of the extra model outputs, one of each a step
ACTION_FORM = "action_form"  # another, where engines enforce what environments offer
TASK_SEED = "task_seed"  # key of the custom data: what the environment was reset with
TASK = "task"  # another: the number of its task in an evaluation
UNLEARNED_STEPS = "unlearned_steps"  # another, of a logged dialogue: numbers of steps that are history only
ENVIRONMENT = "rllib_nlac/environment"  # key of the first info, which no environment of a user has by chance
KEPT = frozenset({"success", "stop_reason", "subgoals", "partner", "task_id", ANSWER})  # of each info of a whole episode
KEPT_FIRST = KEPT | {"system_prompt", TOOLS, ENVIRONMENT}  # of the first


def answer_of(observation: str, info: Mapping[str, Any]) -> tuple[Message, ...]:
    """What an environment says, as messages: those of its info, or the observation as a user's.

    Args:
        observation: The text.
        info: Info of the same step, as ``info_of`` has checked it.
    """
    told = info.get(ANSWER) or [{"role": "user", "content": observation}]
    return tuple(Message(*(said.get(key) or "" for key in Message._fields)) for said in told)


def answer_at(episode: SingleAgentEpisode, t: int) -> tuple[Message, ...]:
    """What the environment said to step t, or with -1 to the last one."""
    place = t + 1 if t >= 0 else t
    return answer_of(episode.get_observations(place), episode.get_infos(place))


def step_outputs(
    generation: Generation, messages: tuple[Message, ...], form: ActionForm | None = None, enforces: bool = False
) -> dict[str, Any]:
    """The extra model outputs of a step.

    Args:
        generation: What was sampled.
        messages: The dialogue before it.
        form: What the environment offered.
        enforces: Whether engines enforce that.
    """
    return {GENERATION: generation, MESSAGES: messages, **({ACTION_FORM: form} if enforces else {})}


def generations_of(episode: SingleAgentEpisode) -> Sequence[Generation]:
    """What was sampled, turn by turn."""
    return episode.get_extra_model_outputs(GENERATION)


def generation_at(episode: SingleAgentEpisode, t: int) -> Generation:
    """What was sampled in step t; negative t count from the end."""
    return episode.get_extra_model_outputs(GENERATION, t)


def messages_at(episode: SingleAgentEpisode, t: int) -> tuple[Message, ...]:
    """The dialogue before step t; negative t count from the end."""
    return episode.get_extra_model_outputs(MESSAGES, t)


def action_form_at(episode: SingleAgentEpisode, t: int) -> ActionForm | None:
    """What the environment offered in step t, where engines enforce that."""
    return episode.get_extra_model_outputs(ACTION_FORM, t) if ACTION_FORM in episode.extra_model_outputs else None


def task_seed_of(episode: SingleAgentEpisode) -> int:
    """What its environment was reset with."""
    return episode.custom_data[TASK_SEED]


def known_task_seed(episode: SingleAgentEpisode) -> int | None:
    """The same; None of a logged dialogue, which no environment played."""
    return episode.custom_data.get(TASK_SEED)


def unlearned_steps(episode: SingleAgentEpisode) -> Sequence[int]:
    """Steps that are part of the history and never learned from."""
    return episode.custom_data.get(UNLEARNED_STEPS, ())


def task_of(episode: SingleAgentEpisode) -> int | str:
    """The number of its task in an evaluation; of an episode of training the seed, which is as good; of one that another
    runner than ours has played the episode's own id.
    """
    return episode.custom_data.get(TASK, episode.custom_data.get(TASK_SEED, episode.id_))


def environment_of(episode: SingleAgentEpisode) -> str | None:
    """The registered name of the environment that was really played, where one plays others, as task sets do."""
    name = episode.get_infos(0).get(ENVIRONMENT)
    return name if isinstance(name, str) else None


def strip_infos(episode: SingleAgentEpisode) -> None:
    """Drops from the infos of a whole episode what nobody reads any more: it may be large, and need not even be picklable."""
    for t, info in enumerate(episode.get_infos()):
        # In the dicts themselves: RLlib holds the last one in a second place, which is pickled too.
        for key in info.keys() - (KEPT if t else KEPT_FIRST):
            del info[key]


def episode_success(episode: SingleAgentEpisode) -> bool:
    """Whether an episode ended in success: the environment's own word, or else a positive return."""
    success = episode.get_infos(-1).get("success")
    return bool(success) if success is not None else episode.get_return() > 0
