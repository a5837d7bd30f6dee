"""The boundary between text and tokens."""

from __future__ import annotations

import itertools
import json
import shutil
import unicodedata

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rllib_nlac.engine.chat import Chat, PromptTooLong
from rllib_nlac.tiny.build import Encoder
from rllib_nlac.tiny.worlds import TWENTY_QUESTIONS
from rllib_nlac.types import Message

DIALOGUE = (Message("user", "Guess my object."), Message("assistant", "Is it big?"), Message("user", "No."))


def test_the_template_is_applied_with_a_turn_to_answer(chat):
    text = chat.tokenizer.decode(chat.prompt_ids(DIALOGUE))
    assert text == "<|user|>Guess my object.<|end|><|assistant|>Is it big?<|end|><|user|>No.<|end|><|assistant|>"


def test_a_longer_dialogue_begins_with_the_shorter_ones_tokens(chat):
    shorter, longer = chat.prompt_ids(DIALOGUE[:1]), chat.prompt_ids(DIALOGUE)
    assert longer[: len(shorter)] == shorter


def test_encode_ends_the_turn_and_decode_hides_it(chat):
    ids = chat.encode("Is it big?")
    assert ids[-1] == chat.end_id and chat.decode(ids) == "Is it big?"


@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=80))
@example("\U0002f800")  # one of those that Unicode's normal form replaces
def test_any_text_survives_but_for_the_tokenizers_normal_form(chat, text):
    normal = unicodedata.normalize("NFC", text).strip()
    assert chat.decode(chat.tokenizer.encode(text, add_special_tokens=False)) == normal or "<|" in text


def test_the_corpus_encoder_equals_the_chat_template(chat):
    encoder = Encoder(chat.tokenizer)
    for shown in itertools.islice(TWENTY_QUESTIONS.corpus(3), 200):
        prompt, answer = encoder(shown)
        assert tuple(prompt) == chat.prompt_ids(shown.prompt) and tuple(answer) == chat.encode(shown.answer)


def test_a_prompt_beyond_the_context_says_what_to_change(chat):
    room = chat.max_context - len(chat.prompt_ids(DIALOGUE))
    chat.prompt_ids(DIALOGUE, room=room)
    with pytest.raises(PromptTooLong, match=f"exceeds the context of {chat.max_context}: raise max_context"):
        chat.prompt_ids(DIALOGUE, room=room + 1)


class TestBadModels:
    def test_missing_folder(self):
        with pytest.raises(FileNotFoundError, match="does not exist"):
            Chat.from_pretrained("./no/such/folder")

    def test_folder_without_a_model(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="lacks config"):
            Chat.from_pretrained(str(tmp_path))

    def test_no_chat_template(self, model_path, tmp_path):
        shutil.copytree(model_path, tmp_path / "model")
        (tmp_path / "model" / "chat_template.jinja").unlink()
        with pytest.raises(ValueError, match="no chat template"):
            Chat.from_pretrained(str(tmp_path / "model"))

    def test_no_end_of_turn(self, model_path, tmp_path):
        shutil.copytree(model_path, tmp_path / "model")
        settings_file = tmp_path / "model" / "tokenizer_config.json"
        settings_file.write_text(json.dumps({**json.loads(settings_file.read_text()), "eos_token": None}))
        with pytest.raises(ValueError, match="no eos_token"):
            Chat.from_pretrained(str(tmp_path / "model"))

    def test_context_longer_than_the_model_reads(self, model_path):
        with pytest.raises(ValueError, match="reads at most 512"):
            Chat.from_pretrained(model_path, max_context=4096)
