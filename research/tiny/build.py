"""Builds the small base model of a world: ``python -m research.tiny.build --world WORLD --out FOLDER``.

Tokenizer (byte-level BPE, in which every word of the little world is one token), chat template and a Qwen2 causal LM,
all in the Hugging Face format. It runs on a laptop's CPU; how long, and how well the model then does each role, stands
in the model card that ``research.tiny.card`` writes next to it.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from research.tiny.corpus import Corpus, Example
from research.tiny.muon import Muon
from research.tiny.worlds import WORLDS, World
from rllib_nlac.learner.packed_attention import restore
from rllib_nlac.learner.packing import Packing

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SPECIAL = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
CONTEXT = 512
PROCESSES = 2  # that train one model, a thread each, with a half of every batch: the weights depend on how many there are
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

    The learner's packs leave out padding and compute once what prompts begin with alike. Processes of one torch.distributed
    group take each step together, with a part of its batch each.
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
        count, total = torch.tensor(float(sum(len(answer) for _, answer in batch))), torch.zeros(())
        add_up([count])
        for group in packing.groups(ids, lengths, torch.arange(len(batch))):
            layout = packing.lay(ids[group], prompts[group], lengths[group])
            loss = -layout.logprobs(model(**layout.arguments).logits).sum() / count
            loss.backward()
            total += loss.detach()
        add_up([total, *(p.grad for p in model.parameters() if p.grad is not None)])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
        recent = [*recent[-99:], total.item()]
        if (step % 100 == 0 or step == steps) and is_first():
            seconds = time.perf_counter() - started
            print(f"step {step}/{steps}  loss {sum(recent) / len(recent):.4f}  {seconds:.0f} s", flush=True)
    restore(model)
    return sum(recent) / len(recent)


def add_up(tensors: list[torch.Tensor]) -> None:
    """Puts the sum over all processes of the group in place of each tensor; nothing where there is no group."""
    if dist.is_initialized():
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat)
        for tensor, whole in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(whole.view_as(tensor))


def is_first() -> bool:
    """Whether this process is the one that speaks and writes."""
    return not dist.is_initialized() or dist.get_rank() == 0


def build(out: Path, world: World, seed: int | None = None, processes: int = PROCESSES) -> None:
    """Trains tokenizer and model, lesson by lesson, and writes them to ``out`` in the Hugging Face format.

    Args:
        out: The folder to write.
        world: What it is about, with its lessons.
        seed: Seeds the first weights and the examples, in place of the world's seed.
        processes: That train together; the same weights come of the same number.
    """
    seed = world.seed if seed is None else seed
    if world.init is not None:
        AutoTokenizer.from_pretrained(world.init).save_pretrained(out)
        model = Qwen2ForCausalLM.from_pretrained(world.init, dtype=torch.float32)
    else:
        tokenizer = train_tokenizer(world.corpus(seed))
        model = make_model(tokenizer, seed)
        tokenizer.save_pretrained(out)
    model.save_pretrained(out)
    # As every user will load it: for a Qwen2 model Transformers puts Qwen2's own splitting rule in place of the saved one, and
    # a model trained with the other never saw its users' tokens for a number.
    AutoTokenizer.from_pretrained(out).save_pretrained(out)
    if processes == 1:
        teach(out, world, seed)
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(teach_together, (processes, folder, out, world, seed), nprocs=processes)


def teach_together(rank: int, processes: int, folder: str, out: Path, world: World, seed: int) -> None:
    """One of the processes that train together."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # they are all on this machine, whatever its name resolves to
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    try:
        teach(out, world, seed, rank, processes)
    finally:
        dist.destroy_process_group()


def teach(out: Path, world: World, seed: int, rank: int = 0, processes: int = 1) -> None:
    """Trains the model in ``out``, lesson by lesson."""
    model = Qwen2ForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(out)
    if is_first():
        print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens", flush=True)
    for number, lesson in enumerate(world.lessons, start=1):
        corpus = world.corpus(seed + number, lesson)
        corpus.rng.seed(f"{seed + number} {rank}")
        data = encoded(corpus, Encoder(tokenizer), lesson.batch_size // processes)
        if is_first():
            print(f"lesson {number} of {len(world.lessons)}", flush=True)
        train(model, data, lesson.steps, lesson.lr)
        if is_first():
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
    build(out, world, arguments.seed)


if __name__ == "__main__":
    main()
