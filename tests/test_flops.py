"""MFU: the arithmetic of a step in closed form, counted on real tokens, and the peaks that it is held against."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from micro import build_learner, update
from transformers import MixtralConfig, MixtralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from rllib_nlac.engine.lora import LoRASettings
from rllib_nlac.learner.adapter import add_adapter
from rllib_nlac.learner.batch import CRITIC, POLICY, TrainingSequence
from rllib_nlac.learner.flops import Arithmetic, arithmetic_of, peak_flops, peak_of

# Two layers of width 16 with 2 heads of 8 and one key-value head, an MLP of 24, and 40 tokens.
SHAPE = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
# By hand: q and o 16 x 16, k and v 16 x 8, three matrices 16 x 24: 256 + 256 + 128 + 128 + 1152 = 1920 a layer.
LAYERS, OUTPUT, ATTENTION = 3840, 640, 32
# Rank 3 on q (16 + 16) and v (16 + 8), two layers: 3 * 56 * 2.
ADAPTER = 336


def model(**changes) -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM(Qwen2Config(**{**SHAPE, "tie_word_embeddings": True, **changes}))


def with_adapter() -> Qwen2ForCausalLM:
    lm = model()
    add_adapter(lm, LoRASettings(rank=3, target_modules=("q_proj", "v_proj")))
    return lm


class TestArithmetic:
    @pytest.mark.parametrize("tied", [True, False])
    def test_it_is_read_from_the_models_own_weights(self, tied):
        """Embeddings, biases and norms do not count, but for the output layer, tied or not."""
        assert arithmetic_of(model(tie_word_embeddings=tied)) == Arithmetic(LAYERS, 0, OUTPUT, True, ATTENTION)

    def test_under_an_adapter_the_base_is_frozen(self):
        found = arithmetic_of(with_adapter())
        assert found == Arithmetic(ADAPTER, LAYERS, OUTPUT, False, ATTENTION)
        assert found.of_base == Arithmetic(0, LAYERS, OUTPUT, False, ATTENTION)

    def test_a_sequence_by_hand(self):
        """Three tokens of a prompt and two of an answer; the output layer speaks of these two alone."""
        whole = Arithmetic(LAYERS, 0, OUTPUT, True, ATTENTION)
        assert whole.of_forward([5], [2]) == 2 * 3840 * 5 + 2 * 640 * 2 + 2 * 32 * 25 == 42_560
        assert whole.of_step([5], [2]) == 6 * 3840 * 5 + 6 * 640 * 2 + 6 * 32 * 25 == 127_680
        lora = Arithmetic(ADAPTER, LAYERS, OUTPUT, False, ATTENTION)
        assert lora.of_step([5], [2]) == (6 * 336 + 4 * 3840) * 5 + 4 * 640 * 2 + 6 * 32 * 25 == 96_800
        assert lora.of_forward([5], [2]) == 2 * (336 + 3840) * 5 + 2 * 640 * 2 + 2 * 32 * 25 == 45_920

    @given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 300)), min_size=1))
    def test_a_batch_costs_what_its_sequences_cost(self, sizes):
        each = Arithmetic(ADAPTER, LAYERS, OUTPUT, False, ATTENTION)
        lengths, answers = [p + a for p, a in sizes], [a for _, a in sizes]
        assert each.of_step(lengths, answers) == sum(each.of_step([p + a], [a]) for p, a in sizes)

    def test_it_agrees_with_what_torch_counts_of_a_pass(self):
        """Torch's own counter finds as much for matrix products; it counts scores for all pairs, not for half."""
        from torch.utils.flop_counter import FlopCounterMode

        for lm in (model(), with_adapter()):
            lm.set_attn_implementation("eager")
            ids = torch.randint(40, (1, 12))
            with FlopCounterMode(display=False) as counter:
                lm(input_ids=ids, logits_to_keep=4, use_cache=False).logits.sum().backward()
            ours = arithmetic_of(lm)
            assert ours is not None
            full = Arithmetic(ours.trained, ours.frozen, ours.output, ours.output_is_trained, 2 * ours.attention)
            # Below the lowest adapter nothing has a gradient: the input of the first layer's q, k, v and A, and its keys.
            spared = 2 * 12 * (256 + 128 + 128 + 3 * 16 * 2) + 2 * 16 * 12**2 if ours.frozen else 0
            assert counter.get_total_flops() == full.of_step([12], [4]) - spared

    def test_of_a_mixture_of_experts_nothing_is_said(self):
        small = {key: value for key, value in SHAPE.items() if key != "vocab_size"}
        assert arithmetic_of(MixtralForCausalLM(MixtralConfig(vocab_size=40, num_local_experts=2, **small))) is None


class TestPeaks:
    @pytest.mark.parametrize(
        ("name", "terabytes", "teraflops"),
        [
            ("NVIDIA H100 80GB HBM3", 3.35, 989),
            ("NVIDIA H100 PCIe", 2.0, 756),
            ("NVIDIA H100 NVL", 3.9, 835),
            ("NVIDIA H200", 4.8, 989),
            ("NVIDIA A100-SXM4-80GB", 2.039, 312),
            ("NVIDIA A100-SXM4-40GB", 1.555, 312),
            ("NVIDIA A100-PCIE-40GB", 1.555, 312),
            ("NVIDIA A100 80GB PCIe", 1.935, 312),
            ("NVIDIA L4", 0.3, 121),
            ("NVIDIA GeForce RTX 4090", 1.008, 165),
        ],
    )
    def test_peaks_by_name(self, name, terabytes, teraflops):
        found = peak_of(name)
        assert (found.bytes_per_s, found.flops) == pytest.approx((terabytes * 1e12, teraflops * 1e12))

    @pytest.mark.parametrize(
        "name",
        ["NVIDIA L40S", "NVIDIA L40", "NVIDIA GH200 480GB", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "Tesla T4", "x86_64 CPU", ""],
    )
    def test_others_are_not_guessed(self, name):
        assert peak_of(name) is None

    def test_a_cpu_and_float32_have_none(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
        assert peak_flops(torch.device("cpu"), "bfloat16") is None
        assert peak_flops(torch.device("cuda"), "float32") is None
        assert peak_flops(torch.device("cuda"), "bfloat16") == pytest.approx(989e12)


class TestLearner:
    """What an update reports, by real learners of that shape."""

    PEAK = 1e9

    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory) -> str:
        path = tmp_path_factory.mktemp("shape")
        torch.manual_seed(0)
        model().save_pretrained(path)
        return str(path)

    @pytest.fixture()
    def flops(self, config, folder, monkeypatch):
        """FLOPs of an update on sequences of several lengths, as its results have them."""
        monkeypatch.setattr("rllib_nlac.learner.learner.peak_flops", lambda device, dtype: self.PEAK)

        def flops(sequences, **settings) -> float:
            result = update(build_learner(config, language_model=folder, **settings), sequences)
            result = {name: float(value.peek()) for name, value in result.items() if name in ("mfu", "tokens_per_s")}
            tokens = sum(len(s.prompt_ids) + len(s.answer_ids) for s in sequences if s.item >= 0)
            return result["mfu"] * self.PEAK * tokens / result["tokens_per_s"]

        return flops

    SIZES = ((3, 2, POLICY), (20, 9, CRITIC), (1, 1, POLICY))

    def sequences(self, copies: int = 0) -> list[TrainingSequence]:
        made = [
            TrainingSequence(tuple(range(2 + i, 2 + i + p)), tuple(range(5, 5 + a)), role, i, 0, 0.1)
            for i, (p, a, role) in enumerate(self.SIZES)
        ]
        return made + [TrainingSequence((2, 3), (5,), POLICY, -1, 0, 0.0)] * copies

    def by_hand(self, sizes, layers: int, output: int, attention: int) -> int:
        return sum(layers * (p + a) + output * a + attention * (p + a) ** 2 for p, a, *_ in sizes)

    def test_padding_and_what_only_fills_up_count_for_nothing(self, flops):
        expected = self.by_hand(self.SIZES, 6 * LAYERS, 6 * OUTPUT, 6 * ATTENTION)
        assert flops(self.sequences()) == pytest.approx(expected)
        assert flops(self.sequences(copies=3)) == pytest.approx(expected)

    @pytest.mark.parametrize(
        ("packing", "tokens", "squares", "logits"),
        # Of the second and the third all but a token of each is the first's; the first is where the fourth ends.
        [("never", 7 + 8 + 8 + 7, 7**2 + 8**2 + 8**2 + 7**2, 2 + 3 + 1 + 2), ("auto", 7 + 1 + 1, 2 * 8**2 - 7**2, 2 + 1)],
    )
    def test_what_sequences_of_a_pack_share_counts_once(self, flops, packing, tokens, squares, logits):
        pairs = [
            ((2, 3, 4, 5, 6), (7, 8)),
            ((2, 3, 4, 5, 6), (7, 8, 9)),
            ((2, 3, 4, 5, 6, 7, 8), (3,)),
            ((2, 3, 4, 5, 6), (7, 8)),
        ]
        made = [TrainingSequence(prompt, answer, CRITIC, i, 0, 0.1) for i, (prompt, answer) in enumerate(pairs)]
        expected = 6 * (LAYERS * tokens + ATTENTION * squares + OUTPUT * logits)
        assert flops(made, learner_model={"packing": packing}) == pytest.approx(expected)

    def test_what_checkpointing_computes_again_counts_for_nothing(self, flops):
        again = flops(self.sequences(), learner_model={"gradient_checkpointing": True})
        assert again == pytest.approx(self.by_hand(self.SIZES, 6 * LAYERS, 6 * OUTPUT, 6 * ATTENTION))

    def test_the_base_is_asked_of_the_policys_sequences_without_a_gradient(self, flops):
        step = self.by_hand(self.SIZES, 6 * LAYERS, 6 * OUTPUT, 6 * ATTENTION)
        base = self.by_hand([s for s in self.SIZES if s[2] == POLICY], 2 * LAYERS, 2 * OUTPUT, 2 * ATTENTION)
        assert flops(self.sequences(), kl_to_base_coeff=0.1) == pytest.approx(step + base)

    def test_with_an_adapter(self, flops):
        step = self.by_hand(self.SIZES, 4 * LAYERS + 6 * ADAPTER, 4 * OUTPUT, 6 * ATTENTION)
        base = self.by_hand([s for s in self.SIZES if s[2] == POLICY], 2 * LAYERS, 2 * OUTPUT, 2 * ATTENTION)
        lora = {"rank": 3, "target_modules": ["q_proj", "v_proj"]}
        assert flops(self.sequences(), lora=lora) == pytest.approx(step)
        assert flops(self.sequences(), lora=lora, kl_to_base_coeff=0.1) == pytest.approx(step + base)

    def test_without_a_peak_there_is_no_mfu(self, config, folder):
        assert "mfu" not in update(build_learner(config, language_model=folder), self.sequences())
