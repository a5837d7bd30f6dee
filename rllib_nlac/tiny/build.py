"""Builds the small base model of a world: ``python -m rllib_nlac.tiny.build --world WORLD --out FOLDER``.

Tokenizer (byte-level BPE, in which every word of the little world is one token), chat template and a Qwen2 causal LM,
all in the Hugging Face format. It runs on a laptop's CPU; how long, and how well the model then does each role, stands
in the model card that ``rllib_nlac.tiny.card`` writes next to it.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from rllib_nlac.learner.packed_attention import restore
from rllib_nlac.learner.packing import Packing
from rllib_nlac.tiny.corpus import Corpus, Example
from rllib_nlac.tiny.muon import Muon
from rllib_nlac.tiny.worlds import WORLDS, World

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SPECIAL = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
CONTEXT = 512
THREADS = 2  # a sum over threads depends on how many there are, and so do the weights
TOKENS = 4096  # of a pack
Encoded = tuple[list[int], list[int]]  # token ids of prompt and answer


def train_tokenizer(corpus: Corpus, examples: int = 4000) -> PreTrainedTokenizerFast:
    """Byte-level BPE with merges enough to make each word of the corpus one token; any other text still encodes."""
    texts = (
        text
        for example in itertools.islice(corpus, examples)
        for text in (*(message.content for message in example.prompt), example.answer)
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=list(SPECIAL[2:]),
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    """A Qwen2 model of about half a million parameters.

    Weights start at 1/sqrt(fan_in) and embeddings at 0.1: with the usual 0.02 a model this small learns to copy only
    late.
    """
    torch.manual_seed(seed)
    config = Qwen2Config(
        # Room for the tokens that Transformers adds when it loads the tokenizer.
        vocab_size=8 * math.ceil((len(tokenizer) + 1) / 8),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=3,
        num_key_value_heads=3,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        use_sliding_window=False,
        rope_theta=10_000.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.1)
    return model


class Encoder:
    """Encodes examples message by message, with a cache; equal to the chat template, which a test proves."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self._cache: dict[str, list[int]] = {}
        self._role = {role: tokenizer.convert_tokens_to_ids(f"<|{role}|>") for role in ("system", "user", "assistant")}

    def __call__(self, example: Example) -> Encoded:
        end = self.tokenizer.eos_token_id
        prompt: list[int] = []
        for message in example.prompt:
            prompt += [self._role[message.role], *self._encode(message.content), end]
        return [*prompt, self._role["assistant"]], [*self._encode(example.answer), end]

    def _encode(self, text: str) -> list[int]:
        if text not in self._cache:
            if len(self._cache) > 200_000:
                self._cache.clear()
            self._cache[text] = self.tokenizer.encode(text, add_special_tokens=False)
        return self._cache[text]


def encoded(corpus: Corpus, encoder: Encoder, batch_size: int) -> Iterator[list[Encoded]]:
    """Endless batches of examples as token ids of prompt and answer. Each mixes the roles: steps on one role undo another's."""
    stream = iter(corpus)
    while True:
        yield [encoder(example) for example in itertools.islice(stream, batch_size)]


def train(model: Qwen2ForCausalLM, data: Iterator[list[Encoded]], steps: int, peak_lr: float) -> float:
    """Supervised training on the answers; returns the mean loss of a token in the last hundred steps.

    The learner's packs leave out padding and compute once what prompts begin with alike.
    """
    packing = Packing.of("always", TOKENS, [model])
    inside = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() != 2 or "embed" in name]
    # Muon for the matrices took clearly fewer steps than AdamW alone (single runs).
    optimizers = [
        Muon(inside, lr=peak_lr, weight_decay=0.01),
        torch.optim.AdamW(others, lr=peak_lr, betas=(0.9, 0.98), weight_decay=0.01),
    ]
    warmup = min(200, max(1, steps // 10))

    def share_of_peak(step: int) -> float:
        return min((step + 1) / warmup, 0.5 * (1 + math.cos(math.pi * min(step / steps, 1.0))) + 1e-3)

    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_peak) for optimizer in optimizers]
    recent: list[float] = []
    started = time.perf_counter()
    for step, batch in enumerate(itertools.islice(data, steps), start=1):
        ids = pad_sequence([torch.tensor([*prompt, *answer]) for prompt, answer in batch], batch_first=True)
        prompts = torch.tensor([len(prompt) for prompt, _ in batch])
        lengths = torch.tensor([len(prompt) + len(answer) for prompt, answer in batch])
        count, total = sum(len(answer) for _, answer in batch), 0.0
        for group in packing.groups(ids, lengths, torch.arange(len(batch))):
            layout = packing.lay(ids[group], prompts[group], lengths[group])
            loss = -layout.logprobs(model(**layout.arguments).logits).sum() / count
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
        recent = [*recent[-99:], total]
        if step % 100 == 0 or step == steps:
            seconds = time.perf_counter() - started
            print(f"step {step}/{steps}  loss {sum(recent) / len(recent):.4f}  {seconds:.0f} s", flush=True)
    restore(model)
    return sum(recent) / len(recent)


def build(out: Path, world: World, seed: int | None = None) -> None:
    """Trains tokenizer and model, lesson by lesson, and writes them to ``out`` in the Hugging Face format.

    Args:
        out: The folder to write.
        world: What it is about, with its lessons.
        seed: Of the first weights and of the examples, in place of the world's.
    """
    seed = world.seed if seed is None else seed
    if world.init is None:
        tokenizer = train_tokenizer(world.corpus(seed))
        model = make_model(tokenizer, seed)
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
    else:
        model = Qwen2ForCausalLM.from_pretrained(world.init, dtype=torch.float32)
        AutoTokenizer.from_pretrained(world.init).save_pretrained(out)
    # Train with the tokenizer as every user will load it: for a Qwen2 model Transformers puts Qwen2's own splitting rule
    # in place of the saved one, and a model trained with the other never saw its users' tokens for a number.
    tokenizer = AutoTokenizer.from_pretrained(world.init or out)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens", flush=True)
    for number, lesson in enumerate(world.lessons, start=1):
        print(f"lesson {number} of {len(world.lessons)}", flush=True)
        corpus = world.corpus(seed + number, lesson)
        data = encoded(corpus, Encoder(tokenizer), lesson.batch_size)
        train(model, data, lesson.steps, lesson.lr)
        model.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", choices=sorted(WORLDS), default="twenty_questions")
    parser.add_argument("--out", type=Path, help="the folder to write; the shipped model's own, where it is not given")
    parser.add_argument("--seed", type=int, help="of the first weights and of the examples, in place of the world's")
    arguments = parser.parse_args()
    world = WORLDS[arguments.world]
    out = arguments.out or world.folder
    if out is None:
        parser.error(f"--out is needed: no model of {world.name} is shipped")
    torch.set_num_threads(THREADS)
    build(out, world, arguments.seed)


if __name__ == "__main__":
    main()
