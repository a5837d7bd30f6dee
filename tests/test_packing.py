"""Packs: what stands in them, that they change nothing but the time it takes, and when sequences are padded instead."""

from __future__ import annotations

import logging
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from micro import GRADIENT, build_learner, update
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from rllib_nlac import NLACConfig
from rllib_nlac.baselines.grpo import GRPOConfig
from rllib_nlac.baselines.scalar_critic import ScalarCriticConfig
from rllib_nlac.learner import packed_attention
from rllib_nlac.learner.batch import CRITIC, POLICY, TrainingSequence
from rllib_nlac.learner.layout import KEYS_SHARE, Layout, Pack, Packed, Padded, packs, shared_beginning
from rllib_nlac.learner.packed_attention import Segments, adopt
from rllib_nlac.learner.packing import Packing

VOCABULARY = 40
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
WINDOW = 4


def model(window: int | None = None) -> Qwen2ForCausalLM:
    """Four heads on two of keys and values; with a window the second layer alone sees all."""
    torch.manual_seed(0)
    kinds = ["sliding_attention" if window else "full_attention", "full_attention"]
    config = Qwen2Config(
        **SMALL,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.5,
        use_sliding_window=bool(window),
        sliding_window=window,
        layer_types=kinds,
    )
    return Qwen2ForCausalLM(config).eval()


# Two of each, by name: as Transformers makes it, and as it takes its attention from packs.
MODELS = {name: (model(window), model(window)) for name, window in (("full", None), ("sliding window", WINDOW))}
for _, own in MODELS.values():
    adopt(own)

# Sequences of few different tokens, so that many begin alike, and some are others' beginnings or the same; prompt and answer.
tokens = st.lists(st.integers(2, 3), min_size=1, max_size=10)
batches = st.lists(st.tuples(tokens, tokens), min_size=1, max_size=7)


def columns(pairs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, lengths of prompts and lengths."""
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor([*prompt, *answer]) for prompt, answer in pairs], batch_first=True)
    prompts, lengths = ([len(prompt) for prompt, _ in pairs], [len(prompt) + len(answer) for prompt, answer in pairs])
    return ids, torch.tensor(prompts), torch.tensor(lengths)


def arrays(pairs) -> list[np.ndarray]:
    return [np.array([*prompt, *answer]) for prompt, answer in pairs]


@pytest.mark.parametrize(
    ("one", "other", "shared"), [([1, 2], [1, 2, 3], 2), ([], [1], 0), ([1, 2], [3, 2], 0), ([1, 2, 3], [1, 9, 3], 1)]
)
def test_the_shared_beginning_ends_where_two_sequences_differ(one, other, shared):
    assert shared_beginning(np.array(one), np.array(other)) == shared_beginning(np.array(other), np.array(one)) == shared


class TestPack:
    @given(batches)
    @settings(max_examples=150)
    def test_each_beginning_stands_once_at_its_position(self, pairs):
        sequences = arrays(pairs)
        pack = Pack.of(sequences)
        for sequence, path, start in zip(sequences, pack.paths, pack.starts, strict=True):
            assert pack.ids[path].tolist() == sequence.tolist() and 0 <= start <= len(sequence)
            assert pack.positions[path].tolist() == list(range(len(sequence)))
        beginnings = {tuple(sequence[:size]) for sequence in sequences for size in range(1, len(sequence) + 1)}
        assert len(pack.ids) == len(pack.positions) == len(beginnings)
        assert sum(map(len, sequences)) - sum(pack.starts) == len(beginnings)

    @given(batches)
    @settings(max_examples=150)
    def test_segments_hold_each_row_once_and_see_what_stands_before_it_in_its_sequence(self, pairs):
        pack = Pack.of(arrays(pairs))
        seen = {}
        for queries, keys in zip(pack.queries, pack.keys, strict=True):
            for back, row in enumerate(reversed(queries)):
                assert row not in seen
                seen[row] = keys[: len(keys) - back].tolist()
        assert sorted(seen) == list(range(len(pack.ids)))
        for path in pack.paths:
            for place, row in enumerate(path):
                assert seen[row] == path[: place + 1].tolist()

    def test_turns_of_an_episode_are_one_segment(self):
        pack = Pack.of([np.arange(9), np.arange(4), np.arange(14), np.array([0, 1, 7])])
        assert [len(queries) for queries in pack.queries] == [14, 1] and len(pack.ids) == 15

    @given(batches, st.integers(1, 60))
    @settings(max_examples=100)
    def test_every_sequence_is_in_one_pack_within_the_budget(self, pairs, budget):
        sequences = arrays(pairs)
        groups = list(packs(sequences, budget))
        assert sorted(i for group in groups for i in group) == list(range(len(sequences)))
        for group in groups:
            pack = Pack.of([sequences[i] for i in group])
            repeated = sum(map(len, pack.keys)) - len(pack.ids)
            assert len(group) == 1 or len(pack.ids) + KEYS_SHARE * repeated <= budget

    def test_what_begins_alike_shares_a_pack(self):
        one, two, three = (np.array([*range(10), last]) for last in (20, 21, 22))
        assert sorted(map(sorted, packs([one, np.array([60, 1]), two, three], 16))) == [[0, 2, 3], [1]]


def losses(lm: PreTrainedModel, layout: Layout) -> torch.Tensor:
    """Log-probabilities of the answers' tokens at a temperature, shape (B, T')."""
    return layout.logprobs(lm(**layout.arguments).logits, 0.7)


def gradient(lm: PreTrainedModel, loss: torch.Tensor) -> torch.Tensor:
    lm.zero_grad()
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in lm.parameters()])


class TestAgainstPadding:
    @pytest.mark.parametrize("kind", MODELS)
    @given(batches, st.integers(0, 99), st.sampled_from([8, 2048]))
    @settings(max_examples=60)
    @example([([2, 2, 2], [2])] * 2, 49, 8)
    def test_logprobs_kl_and_gradients_are_the_same(self, kind, pairs, seed, group):
        plain, own = MODELS[kind]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(packed_attention, "GROUP", group)
            padded, packed = (layout(*columns(pairs)) for layout in (Padded, Packed))
        assert torch.equal(padded.mask, packed.mask)
        mask = padded.mask
        weights = torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed)) * mask
        expected, found = losses(plain, padded), losses(own, packed)
        torch.testing.assert_close(found, expected * mask, rtol=1e-4, atol=1e-4)
        one, other = gradient(own, (found * weights).sum()), gradient(plain, (expected * weights).sum())
        # Sequences that are alike, with weights of opposite signs, leave next to nothing but rounding.
        whole = gradient(plain, (losses(plain, padded) * weights.abs()).sum())
        assert float((one - other).norm()) <= 1e-4 * float(whole.norm()) + 1e-5
        with torch.no_grad():
            of_padded, of_packed = plain(**padded.arguments).logits, own(**packed.arguments).logits
            kl = packed.kl(of_packed, of_packed.flip(-1))
            torch.testing.assert_close(kl, padded.kl(of_padded, of_padded.flip(-1)) * mask, rtol=1e-3, atol=1e-3)

    @pytest.mark.parametrize("kind", MODELS)
    def test_a_token_is_seen_by_its_own_sequence_alone(self, kind):
        _, own = MODELS[kind]
        ids, prompts, lengths = columns([([5, 6, 7], [8, 9]), ([5, 6, 9], [4]), ([3], [4, 5, 6, 7, 8]), ([5, 6, 7, 8, 9], [2])])
        with torch.no_grad():
            before = losses(own, Packed(ids, prompts, lengths))
            ids[2, 0] = 30
            after = losses(own, Packed(ids, prompts, lengths))
        others = [0, 1, 3]
        torch.testing.assert_close(after[others], before[others], rtol=1e-5, atol=1e-5)
        assert float((after[2] - before[2]).abs().max()) > 1e-2

    @pytest.mark.parametrize("kind", MODELS)
    def test_a_model_that_takes_packs_reads_rows_as_before(self, kind):
        plain, own = MODELS[kind]
        ids = torch.randint(3, VOCABULARY, (3, 11), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            torch.testing.assert_close(own(input_ids=ids).logits, plain(input_ids=ids).logits, rtol=1e-4, atol=1e-4)


def by_segment(query, key, value, cu_q, cu_k, max_q, max_k, scale, window_size, grouped):
    """What torch's kernel says that it computes, segment by segment."""
    assert grouped == (query.shape[1] != key.shape[1]) and window_size[1] == 0
    assert cu_q.dtype == cu_k.dtype == torch.int32 and int(cu_k[-1]) == len(key) == len(value)
    results = []
    for (a, b), (c, d) in zip(pairwise(cu_q), pairwise(cu_k), strict=True):
        assert b - a <= max_q and d - c <= max_k
        back = (torch.arange(d - c) - (d - c) + (b - a))[None] - torch.arange(b - a)[:, None]  # 0 is the query's own place
        seen = (back <= 0) & ((window_size[0] < 0) | (back >= -window_size[0]))
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query[a:b], key[c:d], value[c:d]))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=grouped)
        results.append(out[0].transpose(0, 1))
    return torch.cat(results)


def of_torch_2_13(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
    return by_segment(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size, enable_gqa)


def of_torch_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
    grouped = query.shape[1] != key.shape[1]
    return by_segment(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size, grouped)


class TestKernel:
    """What torch's kernel is given, on a GPU, by a function that does what its documentation says."""

    @pytest.mark.parametrize("kernel", [of_torch_2_13, of_torch_2_11])
    @pytest.mark.parametrize("kind", MODELS)
    @given(batches)
    @settings(max_examples=25)
    def test_it_is_given_the_same_segments(self, kernel, kind, pairs):
        _, own = MODELS[kind]
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr(packed_attention, "varlen_attn", kernel)
            found = losses(own, Packed(*columns(pairs), by_kernel=True))
        with torch.no_grad():
            torch.testing.assert_close(found, losses(own, Packed(*columns(pairs))), rtol=1e-4, atol=1e-4)

    def test_without_shared_beginnings_nothing_is_copied(self):
        pack = Pack.of([np.array([3, 4, 5]), np.array([6, 7])])
        segments = Segments.of(pack.queries, pack.keys, torch.device("cpu"), by_kernel=True)
        assert segments.key_rows is None and segments.queries.tolist() == segments.keys.tolist() == [0, 3, 5]
        assert segments.longest == (3, 3)

    def test_a_cpu_and_float32_have_none(self):
        assert not packed_attention.has_kernel(MODELS["full"][1])


def run_of(lm: PreTrainedModel):
    return lambda layout: lm(**layout.arguments).logits


def checked(lm: PreTrainedModel, way: str = "auto") -> Packing:
    packing = Packing.of(way, 64, [lm])
    packing.check(run_of(lm), [lm])
    return packing


@pytest.fixture()
def reasons():
    """What the log says of why sequences are padded."""
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("rllib_nlac.learner").addHandler(handler)
    yield said
    logging.getLogger("rllib_nlac.learner").removeHandler(handler)


class TestChoice:
    def test_what_packs_is_found_out_and_nothing_is_said(self, reasons):
        packing = checked(model())
        assert packing.packs and not packing.by_kernel and not reasons
        assert isinstance(packing.lay(*columns([([3], [4])])), Packed)

    def test_never_is_never(self, reasons):
        lm = model()
        assert not checked(lm, "never").packs and lm.config._attn_implementation == "sdpa" and not reasons

    def test_a_gpu_pads_unless_it_is_told_to_pack(self, reasons):
        on_gpu = SimpleNamespace(device=torch.device("cuda"))
        assert not Packing.of("auto", 64, [on_gpu]).packs and not reasons
        Packing.of("always", 64, [on_gpu])
        assert "SimpleNamespace takes no attention from outside" in reasons[0]  # so it was looked at
        assert checked(model(), "always").packs

    def test_a_model_with_a_state_is_padded(self, reasons):
        lm = MambaForCausalLM(MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, state_size=4))
        packing = checked(lm)
        assert not packing.packs and len(reasons) == 1 and "MambaForCausalLM takes no attention from outside" in reasons[0]
        assert isinstance(packing.lay(*columns([([3], [4])])), Padded)

    def test_another_kind_of_attention_is_padded(self, reasons):
        lm = Gemma2ForCausalLM(Gemma2Config(**SMALL, num_attention_heads=2, num_key_value_heads=2, attn_implementation="sdpa"))
        assert not checked(lm).packs and len(reasons) == 1 and "does not take a pack: its attention has softcap" in reasons[0]
        assert lm.config._attn_implementation == "sdpa" and lm(input_ids=torch.tensor([[3, 4]])).logits.isfinite().all()

    def test_an_attention_that_was_chosen_stays(self, reasons):
        lm = model()
        lm.set_attn_implementation("eager")
        assert not checked(lm).packs and "attn_implementation 'eager', and packs go with 'sdpa' alone" in reasons[0]
        assert lm.config._attn_implementation == "eager"

    def test_a_model_that_goes_on_from_one_sequence_to_the_next_is_padded(self, reasons):
        """As one whose layers hand on no positions, or have a state beside their attention."""
        lm = model()
        run = run_of(lm)

        def forgets_positions(layout: Layout) -> torch.Tensor:
            layout.arguments.pop("position_ids", None)
            return run(layout)

        packing = Packing.of("auto", 64, [lm])
        packing.check(forgets_positions, [lm])
        assert not packing.packs and len(reasons) == 1 and "what differs by" in reasons[0]
        assert lm.config._attn_implementation == "sdpa"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("packed")
    model().save_pretrained(path)
    return str(path)


def sequences(count: int = 9) -> list[TrainingSequence]:
    """Turns of episodes, futures and actions of the same states, a copy; several begin alike."""
    rng = np.random.default_rng(0)
    opening, made = (5, 6, 7), []
    for i in range(count):
        more = tuple(int(x) for x in rng.integers(2, 4, rng.integers(0, 6)))
        answer = tuple(int(x) for x in rng.integers(2, VOCABULARY, rng.integers(1, 6)))
        behaviour = rng.normal(-3.7, 0.4, len(answer)).astype(np.float32)
        made.append(TrainingSequence(opening + more, answer, i % 2, i, 0, float(rng.uniform(0.1, 0.4)), 0.5 - i % 3, behaviour))
    turn = made[0]
    longer = (*turn.prompt_ids, *turn.answer_ids, 9, 9)
    made.append(TrainingSequence(longer, (8, 1), POLICY, count, 0, 0.2, -1.0, (-3.0, -4.0)))
    return [*made, TrainingSequence(turn.prompt_ids, turn.answer_ids, CRITIC, count + 1, 0, 0.3, 1.0, turn.logprobs)]


def packing_learner(kind, folder: str, packing: str, budget: int, learner_model=None, **changes):
    """A learner that packs or not."""
    held = {**(learner_model or {}), "packing": packing}
    changes |= {"language_model": folder, "max_tokens_per_micro_batch": budget, "learner_model": held}
    return build_learner(kind(), **changes)


def whole_weights(learner) -> torch.Tensor:
    """All that is trained, also where it is sharded."""
    return torch.cat([p.detach().flatten().clone() for part in learner.trainer.parts() for p in part.values()])


class TestLearner:
    @pytest.mark.parametrize("budget", [12, 10_000])
    @pytest.mark.parametrize(
        ("kind", "changes"),
        [
            (NLACConfig, {}),
            (NLACConfig, {"kl_to_base_coeff": 0.3}),
            (NLACConfig, {"lora": {"rank": 2}, "kl_to_base_coeff": 0.3}),
            (NLACConfig, {"learner_model": {"gradient_checkpointing": True}}),
            (NLACConfig, {"deepspeed_config": {"zero_optimization": {"stage": 3}}}),
            (GRPOConfig, {"action_temperature": 0.5}),
            (ScalarCriticConfig, {}),
        ],
    )
    def test_its_step_is_the_one_of_padded_sequences(self, folder, kind, changes, budget):
        steps = []
        for packing in ("auto", "never"):
            learner = packing_learner(kind, folder, packing, budget, **{**GRADIENT, **changes})
            assert learner.packing.packs == (packing == "auto")
            if hasattr(learner.trained, "head"):
                torch.nn.init.constant_(learner.trained.head.weight, 0.3)
            for name, parameter in learner.trained.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.constant_(parameter, 0.05)
            before = whole_weights(learner)
            update(learner, sequences())
            steps.append(whole_weights(learner) - before)
        assert float(steps[1].norm()) > 1e-3
        assert float((steps[0] - steps[1]).norm() / steps[1].norm()) < 2e-3

    def test_what_it_says_of_texts_is_the_same(self, folder):
        texts = [list(column) for column in zip(*[(s.prompt_ids, s.answer_ids) for s in sequences()], strict=True)]
        said = []
        for packing in ("auto", "never"):
            learner = packing_learner(ScalarCriticConfig, folder, packing, 30)
            torch.nn.init.constant_(learner.trained.head.weight, 0.3)
            whole = [(*prompt, *answer) for prompt, answer in zip(*texts, strict=True)]
            own = [np.concatenate(learner.logprobs_of(*texts)), learner.q_values(whole, False)]
            lm = packing_learner(NLACConfig, folder, packing, 30)
            lm.target.state["lm_head.weight"] *= 2.0
            said.append([*own, *(np.concatenate(found) for found in lm.token_logprobs(*texts).values())])
        for packed, padded in zip(*said, strict=True):
            np.testing.assert_allclose(packed, padded, rtol=1e-3, atol=1e-4)
        assert len(said[0]) == 4

    def test_the_same_seed_gives_the_same_numbers(self, folder):
        learners = [build_learner(NLACConfig(), language_model=folder, lr=1e-2) for _ in range(2)]
        for learner in learners:
            update(learner, sequences())
        one, other = (torch.cat([p.flatten() for p in learner.trained.parameters()]) for learner in learners)
        assert torch.equal(one, other)

    def test_fewer_passes_are_made_than_of_padded_sequences(self, folder):
        made = {}
        for packing in ("auto", "never"):
            learner = packing_learner(NLACConfig, folder, packing, 40)
            passes = made[packing] = []
            learner.lm.register_forward_hook(lambda *_, passes=passes: passes.append(1))
            update(learner, sequences(20))
        assert 0 < len(made["auto"]) < len(made["never"])
