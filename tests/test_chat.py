"""The boundary between text and tokens."""

from __future__ import annotations

import json
import shutil
import unicodedata
from types import SimpleNamespace

import numpy as np
import pytest
from attacks.families import Family
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from rllib_nlac.engine.chat import Chat, PromptTooLong, Wanted, check_model_path
from rllib_nlac.language.parsing import parse_action
from rllib_nlac.types import Generation, Message, Seen

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


@settings(max_examples=50)
@given(text=st.text(max_size=80))
@example("\U0002f800")  # one of those that Unicode's normal form replaces
def test_any_text_survives_but_for_the_tokenizers_normal_form(chat, text):
    normal = unicodedata.normalize("NFC", text).strip()
    assert chat.decode(chat.tokenizer.encode(text, add_special_tokens=False)) == normal or "<|" in text


class TestTurnsThatEndOtherwise:
    """As of Gemma 2: what ends a turn is not the tokenizer's ``eos_token``, and a system message has no place."""

    TEMPLATE = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}{% for m in messages %}"
        "{{ '<start_of_turn>' + m['role'] + '\\n' + m['content'] + '<end_of_turn>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>assistant\\n' }}{% endif %}"
    )

    @pytest.fixture()
    def chat(self):
        tokenizer = Family(self.TEMPLATE, ("<eos>", "<start_of_turn>", "<end_of_turn>")).tokenizer()
        return Chat(tokenizer, 4096, [*tokenizer.convert_tokens_to_ids(["<eos>", "<end_of_turn>"])])

    def test_a_turn_ends_as_in_a_dialogue(self, chat):
        """Fails where logged and corrected turns are trained to end by eos, which no dialogue shows."""
        assert chat.tokenizer.convert_ids_to_tokens(chat.end_id) == "<end_of_turn>" != chat.tokenizer.eos_token
        assert chat.encode("Is it big?")[-1] == chat.end_id and set(chat.end_ids) == {chat.end_id, chat.tokenizer.eos_token_id}

    def test_the_end_is_no_part_of_the_turn_also_where_the_tokenizer_calls_it_no_special_token(self):
        family = Family(self.TEMPLATE, ("<eos>", "<start_of_turn>"))
        tokenizer = family.tokenizer()
        tokenizer.add_tokens([AddedToken("<end_of_turn>", special=False, normalized=False)])
        end = tokenizer.convert_tokens_to_ids("<end_of_turn>")
        chat = Chat(tokenizer, 4096, [end])
        assert chat.decode((*tokenizer.encode("Is it big?", add_special_tokens=False), end)) == "Is it big?"

    @pytest.mark.parametrize("end", ["<end_of_turn>", "<eos>"])
    def test_what_was_sampled_stays_as_it_is(self, chat, end):
        """Fails where the sampled end is no end to the one who writes the next prompt: all is encoded again."""
        start = DIALOGUE[:1]
        ids = chat.prompt_ids(start)
        turn = (*chat.encode("Is it big?")[:-1], chat.tokenizer.convert_tokens_to_ids(end))
        (prompt,) = chat.prompts([Wanted(DIALOGUE, seen=Seen(ids, turn))])
        assert prompt == (chat.prompt_ids(DIALOGUE), False)

    def test_a_system_message_without_a_place_opens_the_first_other_one(self, chat):
        told = chat.tokenizer.decode(chat.prompt_ids((Message("system", "Play <eos>."), *DIALOGUE[:1])))
        assert told == "<start_of_turn>user\nPlay <eos>.\n\nGuess my object.<end_of_turn>\n<start_of_turn>assistant\n"
        ids = chat.prompt_ids((Message("system", "Play <eos>."), *DIALOGUE[:1]))
        assert chat.tokenizer.eos_token_id not in ids  # a message's text is no control token
        assert chat.prompt_ids((Message("system", "Play."), DIALOGUE[1], DIALOGUE[2]))


class TestTemplatesOfBaseModels:
    """As of base models that ship a chat template: their files name another end, and some templates know no header."""

    TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    HEADER = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"

    def chat(self, template: str) -> Chat:
        return Chat(Family(template, ("<|endoftext|>", "<|im_start|>", "<|im_end|>")).tokenizer(), 4096)

    def test_what_the_template_writes_behind_a_turn_ends_it_though_no_file_says_so(self):
        """Fails where only named tokens end an answer: none ends, and the words of other roles become actions."""
        chat = self.chat(self.TEMPLATE + self.HEADER)
        assert chat.tokenizer.eos_token == "<|endoftext|>" and chat.ends == "<|endoftext|>, <|im_end|>"
        assert chat.tokenizer.convert_ids_to_tokens(chat.encode("Is it big?")[-1]) == "<|im_end|>"

    def test_text_behind_a_turn_is_no_end(self):
        chat = self.chat("{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}assistant: ")
        assert chat.ends == "<|endoftext|>"

    def test_a_prompt_ends_with_the_header_that_the_template_leaves_out(self):
        """Fails where the model has to write it: "assistant" then leads every action."""
        chat, whole = self.chat(self.TEMPLATE), self.chat(self.TEMPLATE + self.HEADER)
        assert chat.template.header == "<|im_start|>assistant\n" and whole.template.header == ""
        assert chat.prompt_ids(DIALOGUE) == whole.prompt_ids(DIALOGUE)
        assert chat.template.obstacle == "" and chat.template.opening == whole.template.opening


@pytest.mark.parametrize("special", [False, True])
def test_a_reasoning_block_is_no_invented_turn_though_its_tokens_be_special(special):
    think = ("<think>", "</think>")
    template = "{% for m in messages %}{{ '<|a|>' + m['content'] + '<|end|>' }}{% endfor %}"
    family = Family(template, ("<|end|>", "<|a|>", *(think if special else ())), () if special else think)
    chat = Chat(family.tokenizer(), 100)

    def invents(text: str) -> bool:
        ids = chat.tokenizer.encode(text, add_special_tokens=False)
        return chat.invents_a_turn(Generation((), tuple(ids), np.zeros(0), True, 0))

    assert len(chat.template.control.thinking_ids) == 2
    assert not invents("<think>hm</think>go<|end|>") and not invents("go") and not invents("")
    assert invents("<think>hm</think>go<|a|>no<|end|>") and invents("go<|end|>no")


@pytest.mark.parametrize("special", [False, True])
def test_a_reasoning_block_is_read_and_written_though_its_tokens_be_special(special):
    """Fails where they are left out as all special tokens are: then the thoughts are what the agent does."""
    think = ("<think>", "</think>")
    template = "{% for m in messages %}{{ '<|a|>' + m['content'] + '<|end|>' }}{% endfor %}"
    chat = Chat(Family(template, ("<|end|>", "<|a|>", *(think if special else ())), () if special else think).tokenizer(), 100)
    turn = "<think>a dog, or a cat</think>Is it big?"
    ids = chat.encode(turn)
    assert sum(id in chat.template.control.thinking_ids for id in ids) == 2
    assert parse_action(chat.decode(ids), "plain") == "Is it big?"
    other = chat.tokenizer.encode("<|a|>", add_special_tokens=False)
    assert chat.decode((*ids[:-1], *other)).replace(" ", "") == turn.replace(" ", "")
    hostile = chat.prompt_ids((Message("user", turn),))
    assert chat.template.control.thinking_ids.isdisjoint(hostile)  # of the environment they are text


def test_the_tokens_by_which_a_model_ends_are_read_from_its_folder(tmp_path, model_path):
    shutil.copytree(model_path, tmp_path / "model")
    file = tmp_path / "model" / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": [1, 3]}))
    assert Chat.from_pretrained(str(tmp_path / "model")).end_ids == (1, 3)
    file.unlink()
    assert Chat.from_pretrained(str(tmp_path / "model")).end_ids == (1,)
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": [1, 3]}))
    assert Chat.from_pretrained(str(tmp_path / "model")).end_ids == (1, 3)


def test_a_prompt_beyond_the_context_says_what_to_change(chat):
    room = chat.max_context - len(chat.prompt_ids(DIALOGUE))
    chat.prompt_ids(DIALOGUE, room=room)
    with pytest.raises(PromptTooLong, match=f"exceeds the context of {chat.max_context}: raise max_context"):
        chat.prompt_ids(DIALOGUE, room=room + 1)


def test_as_many_characters_as_may_fit_are_tokenized_and_no_more(chat):
    """A run of spaces is one token: 64 characters of them for each token of the context may fit, and one more is refused."""
    small = Chat(chat.tokenizer, 40)
    with pytest.raises(PromptTooLong) as refused:
        small.prompt_ids((Message("user", "x" * (64 * 40)),))
    assert "tokens with room for 0 more exceeds the context of 40" in str(refused.value)
    for split in (1, 500):  # whichever message has them
        with pytest.raises(PromptTooLong, match="a prompt of 2561 characters exceeds the context of 40"):
            small.prompt_ids((Message("user", "x" * split), Message("assistant", "y"), Message("user", "x" * (2560 - split))))


def test_a_prompt_that_ends_in_an_open_block_is_one_that_opens_thinking(chat):
    def ids(text: str) -> list[int]:
        return chat.tokenizer.encode(text, add_special_tokens=False)

    assert chat.opens_thinking(ids("Guess my object. " * 9 + "<think>\n"))
    assert not chat.opens_thinking(ids("<think>\nhm\n</think>\n"))
    assert not chat.opens_thinking(ids("<think>" + " Guess my object." * 9))
    assert not chat.opens_thinking(())


def test_what_a_model_reads_is_its_context_unless_less_is_asked_for(model_path, monkeypatch):
    assert Chat.from_pretrained(model_path).max_context == Chat.from_pretrained(model_path, 512).max_context == 512
    assert Chat.from_pretrained(model_path, 100).max_context == 100
    silent = SimpleNamespace(get_text_config=lambda: SimpleNamespace())
    monkeypatch.setattr("rllib_nlac.engine.chat.read_config", lambda model: silent)
    monkeypatch.setattr("rllib_nlac.engine.chat.check_vocabulary", lambda *_: None)
    assert Chat.from_pretrained(model_path, 100).max_context == 100
    with pytest.raises(ValueError, match="does not say how much it reads at once: set max_context"):
        Chat.from_pretrained(model_path)


@pytest.mark.parametrize("name", ["owner/model", "model"])
def test_a_hubs_name_is_no_folder_that_is_missing(name):
    check_model_path(name)


@pytest.mark.parametrize("name", ["./model", "/no/model", "~/model", "some/folder/model", ".model"])
def test_a_path_to_nothing_is_a_folder_that_is_missing(name):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        check_model_path(name)


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
