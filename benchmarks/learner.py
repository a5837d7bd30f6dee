"""Training speed beside plain torch: ``python -m benchmarks.learner``.

All sides make as many gradient steps on the same sequences, turn about in one process on one thread, so that the ratio hardly
depends on what else the machine is doing. Plain torch is what a loop for supervised fine-tuning does: Transformers' own forward
pass over a padded batch with its attention mask, logits at every position, cross-entropy, clipping, AdamW; no target weights,
no losses by sequence. The learner differs by its budget, ``max_tokens_per_micro_batch``, and with the goal's budget by whether
it packs its sequences or pads them. Once no two sequences begin alike, and once they do, about as those of a gradient step of
NLAC: an opening that all have, and three sequences of each state. All batches are made before the clock starts. Where TRL is
installed (``pip install --no-deps trl accelerate datasets multiprocess dill xxhash``), its SFTTrainer makes as many steps on
the same sequences, by its own clock. Prints tables; nothing is asserted.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.figures import LEARNER, TRL, Figure, add_option, hand_over
from rllib_nlac import NLACConfig
from rllib_nlac.envs.spaces import TextSpace
from rllib_nlac.learner.batch import CRITIC, POLICY, TrainingSequence, into_minibatches, to_multi_agent_batch
from rllib_nlac.learner.layout import Pack
from rllib_nlac.learner.learner import LanguageLearner

LR = 1e-4
BUDGET = 2048  # for which there is a goal
GOAL_OF = f"learner, {BUDGET}, packed"


def make_sequences(steps: int, size: int, seed: int = 0, times: int = 1, alike: bool = False) -> list[TrainingSequence]:
    """Random tokens with about the lengths of the text house: two of three are futures, the third is a command.

    Args:
        steps: Gradient steps.
        size: Sequences of a step.
        seed: Seeds the tokens.
        times: So many times as long.
        alike: Whether all begin with the same 20 tokens, and the three of a state differ in the last 8 of their prompts alone.
    """
    rng = np.random.default_rng(seed)
    sequences = []
    opening, state = rng.integers(3, 500, 20 * times), np.zeros(0, np.int64)
    for item in range(steps * size):
        role = CRITIC if item % 3 else POLICY
        if not alike or role == POLICY:
            state = rng.integers(3, 500, times * rng.integers(35, 80))
        answer = times * (rng.integers(8, 40) if role == CRITIC else rng.integers(3, 6))
        prompt = (
            state if not alike else np.concatenate([opening, state[20 * times : -8 * times], rng.integers(3, 500, 8 * times)])
        )
        sequences.append(TrainingSequence(prompt.tolist(), rng.integers(3, 500, answer).tolist(), role, item, 0, 1.0))
    if not alike:
        return into_minibatches(sequences, size, 1, rng)
    return [replace(s, minibatch=item // size, weight=1 / size) for item, s in enumerate(sequences)]


def share_alike(sequences: list[TrainingSequence]) -> float:
    """Number of all tokens, shared beginnings of sequences of the same gradient step included."""
    steps: dict[int, list[np.ndarray]] = {}
    for s in sequences:
        steps.setdefault(s.minibatch, []).append(np.array([*s.prompt_ids, *s.answer_ids]))
    tokens = sum(len(sequence) for members in steps.values() for sequence in members)
    return sum(sum(Pack.of(members).starts) for members in steps.values()) / tokens


def make_learner(model: str, budget: int, packing: str = "auto") -> LanguageLearner:
    """A learner of a model with a budget."""
    config = NLACConfig().language(language_model=model, max_tokens_per_micro_batch=budget)
    return build_learner(config.language(learner_model={"packing": packing}).training(lr=LR))


def build_learner(config: NLACConfig) -> LanguageLearner:
    """The learner as the algorithm builds it, outside of one."""
    spec = config.get_default_rl_module_spec()
    spec.observation_space = spec.action_space = TextSpace()
    learner = LanguageLearner(config=config, module_spec=spec)
    learner.build()
    return learner


class PlainTorch:
    """A loop without this package."""

    def __init__(self, model: str, sequences: list[TrainingSequence]) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=0.0)
        steps: dict[int, list[TrainingSequence]] = {}
        for sequence in sequences:
            steps.setdefault(sequence.minibatch, []).append(sequence)
        self.batches = [self._batch(members) for members in steps.values()]

    @staticmethod
    def _batch(members: list[TrainingSequence]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Ids, labels and attention mask, each (N, T)."""
        longest = max(len(s.prompt_ids) + len(s.answer_ids) for s in members)
        ids = torch.zeros(len(members), longest, dtype=torch.long)
        labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
        for row, s in enumerate(members):
            start, end = len(s.prompt_ids), len(s.prompt_ids) + len(s.answer_ids)
            ids[row, :end] = torch.tensor([*s.prompt_ids, *s.answer_ids])
            labels[row, start:end], mask[row, :end] = ids[row, start:end], 1
        return ids, labels, mask

    def train(self) -> None:
        for ids, labels, mask in self.batches:
            logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()


class SFT:
    """TRL's SFTTrainer on the same sequences, a batch of so many a step."""

    def __init__(self, model: str, sequences: list[TrainingSequence], steps: int, size: int) -> None:
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        rows = [
            {"input_ids": [*s.prompt_ids, *s.answer_ids], "labels": [-100] * len(s.prompt_ids) + list(s.answer_ids)}
            for s in sequences
        ]
        self._folder = tempfile.TemporaryDirectory()  # it asks for one, and nothing is saved in it
        settings = SFTConfig(
            self._folder.name,
            max_steps=steps,
            per_device_train_batch_size=size,
            learning_rate=LR,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataset_kwargs={"skip_prepare_dataset": True},
        )
        own = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(model)
        self.trainer = SFTTrainer(own, settings, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)

    def seconds(self) -> float:
        """Seconds of one round, as the trainer measures it, without its preparation."""
        return self.trainer.train().metrics["train_runtime"]


def seconds(work: Callable[[], object]) -> float:
    """Seconds of one round; work that has a clock of its own says so."""
    started = time.perf_counter()
    told = work()
    return told if isinstance(told, float) else time.perf_counter() - started


def options() -> argparse.ArgumentParser:
    """Arguments of this command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny_house")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--size", type=int, default=48, help="sequences of a gradient step")
    parser.add_argument("--budgets", type=int, nargs="+", default=[8192, 4096, BUDGET, 1024, 512])
    parser.add_argument("--rounds", type=int, default=7)
    add_option(parser)
    return parser


def main() -> None:
    arguments = options().parse_args()
    torch.set_num_threads(1)
    for alike in (False, True):
        measure(arguments, alike)


def measure(arguments: argparse.Namespace, alike: bool) -> None:
    """All sides on sequences of one kind."""
    sequences = make_sequences(arguments.steps, arguments.size, alike=alike)
    batch = to_multi_agent_batch(sequences, env_steps=len(sequences))
    tokens = sum(len(s.prompt_ids) + len(s.answer_ids) for s in sequences)

    model_path = NLACConfig().language(language_model=arguments.model).model_path
    plain = PlainTorch(model_path, sequences)
    sides: dict[str, Callable[[], object]] = {"plain torch": plain.train}
    if importlib.util.find_spec("trl"):
        sides["TRL"] = SFT(model_path, sequences, arguments.steps, arguments.size).seconds
    for budget in arguments.budgets:
        for packing, how in (("auto", "packed"), ("never", "padded")):
            if how == "padded" and budget != BUDGET:
                continue
            learner = make_learner(arguments.model, budget, packing)
            sides[f"learner, {budget}, {how}"] = lambda learner=learner: learner.update(
                batch=batch, timesteps={"num_env_steps_sampled_lifetime": 0}
            )
    spent: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(arguments.rounds + 1):
        for name, work in sides.items():
            took = seconds(work)
            if number:  # the first is for warming up
                spent[name].append(took)
    mean, kind = tokens / len(sequences), "begin alike" if alike else "begin differently"
    print(
        f"tokens/s trained on, {arguments.steps} steps of {arguments.size} sequences (mean {mean:.0f} tokens) that {kind}: "
        f"{share_alike(sequences):.0%} of the tokens repeat another's beginning"
    )
    for name, took in spent.items():
        median, text = ratio(took, spent["plain torch"])
        print(f"  {name:21s} {tokens / statistics.median(took):7.0f}   ratio to plain torch {text}", flush=True)
        if name.startswith("learner"):
            goal = LEARNER if name == GOAL_OF and not alike else ()
            hand_over(arguments.figures, Figure(f"{name}, sequences that {kind}, beside plain torch", median, "", *goal))
    if "TRL" in sides and GOAL_OF in sides:
        median, text = ratio(spent[GOAL_OF], spent["TRL"])
        print(f"{GOAL_OF}, beside TRL: {text}")
        goal = TRL if not alike else ()
        hand_over(arguments.figures, Figure(f"{GOAL_OF}, sequences that {kind}, beside TRL", median, "", *goal))


def ratio(mine: list[float], others: list[float]) -> tuple[float, str]:
    """How many times as long others took, round by round: the median, and the same with its spread."""
    ratios = [other / own for own, other in zip(mine, others, strict=True)]
    median = statistics.median(ratios)
    return median, f"{median:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


if __name__ == "__main__":
    main()
