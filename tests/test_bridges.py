"""Prompts that grow: what an engine has seen and sampled stays as it is, and only what is new is encoded."""

from __future__ import annotations

import copy
import functools
import itertools
from dataclasses import replace

import pytest
from attacks.families import FAMILIES as OTHERS
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_nlac.engine.chat import Chat, PromptTooLong, Wanted
from rllib_nlac.types import Message, Seen

# Templates that leave the thoughts of former turns out, of models that open their thoughts themselves.
QWEN3 = replace(
    OTHERS["thinking"],
    template="{% for m in messages %}{% set text = m['content'] %}"
    "{% if m['role'] == 'assistant' and '</think>' in text and not loop.last %}"
    "{% set text = text.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + text + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
)
FAMILIES = {**OTHERS, "qwen3": QWEN3}
# In the manner of Qwen2.5, Qwen3 that thinks and that does not, Llama 3, Gemma and Mistral, and of others.
EXTENDED = ("chatml", "qwen3", "llama3", "gemma", "mistral", "phi", "command_r", "shipped", "slow")
# The prompt's own opening of a thought, or its empty one, is not shown once the turn is over.
WRITTEN_ANEW = ("thinking", "not_thinking", "deepseek")
OPENING = (Message("user", "Guess my object."),)
WORDS = ["hello", "Is it big", "?", " ", "\n", "user", "é", "yes", "1", "a < b", "\U0001f600"]


@functools.cache
def chat_of(name: str) -> Chat:
    return Chat(FAMILIES[name].tokenizer(), 10_000)


def texts(words=WORDS):
    return st.lists(st.sampled_from(words), max_size=6).map("".join).map(str.strip)


def whole_text(chat: Chat, messages) -> str:
    """What the template writes, control tokens in the texts and all."""
    rows = [message._asdict() for message in messages]
    return chat.tokenizer.apply_chat_template(rows, tokenize=False, add_generation_prompt=True)


def read(chat: Chat, ids) -> str:
    return chat.tokenizer.decode(list(ids))


def canonical_turn(chat: Chat, state, turn: str, reply: str) -> tuple[int, ...]:
    """A turn's ids as the whole dialogue has them, where they stand apart from what surrounds them."""
    before, after = (chat.prompt_ids(m) for m in (state, (*state, Message("assistant", turn), Message("user", reply))))
    # What follows the turn begins with its end.
    assert after[: len(before)] == before
    return after[len(before) : after.index(chat.end_id, len(before))]


def one_more(chat: Chat, state, prompt_ids, turn_ids, reply: str):
    """The next dialogue and its prompt, with the turn as it was sampled."""
    messages = (*state, Message("assistant", chat.decode(turn_ids)), Message("user", reply))
    (prompt,) = chat.prompts([Wanted(messages, seen=Seen(prompt_ids, turn_ids))])
    assert not isinstance(prompt, PromptTooLong)
    return messages, prompt


@pytest.mark.parametrize("name", EXTENDED)
def test_turns_as_the_tokenizer_has_them_give_the_ids_of_the_whole_dialogue(name):
    chat = chat_of(name)

    @settings(max_examples=30, database=None)
    @given(turns=st.lists(st.tuples(texts().filter(bool), texts(), st.booleans()), min_size=1, max_size=3))
    def check(turns):
        state, ids = OPENING, chat.prompt_ids(OPENING)
        for turn, reply, is_whole in turns:
            said = canonical_turn(chat, state, turn, reply)
            if chat.decode(said) != turn:
                return  # of a tokenizer that changes spaces
            state, prompt = one_more(chat, state, ids, (*said, chat.end_id) if is_whole else said, reply)
            ids = prompt.ids
            assert not prompt.retokenised and ids == chat.prompt_ids(state)

    check()


@pytest.mark.parametrize("name", EXTENDED)
def test_sampled_ids_are_kept_where_the_tokenizer_would_have_chosen_others(name):
    """Fails where a turn is encoded again: each of its characters is sampled alone here."""
    chat = chat_of(name)

    @settings(max_examples=30, database=None)
    @given(turns=st.lists(st.tuples(texts(), texts()), min_size=1, max_size=3))
    def check(turns):
        state, ids = OPENING, chat.prompt_ids(OPENING)
        for turn, reply in turns:
            said = tuple(i for letter in turn for i in chat.tokenizer.encode(letter, add_special_tokens=False))
            longer, prompt = one_more(chat, state, ids, (*said, chat.end_id), reply)
            assert not prompt.retokenised
            assert prompt.ids[: len(ids) + len(said)] == (*ids, *said)
            state, ids = longer, prompt.ids
        if FAMILIES[name].kind == "bytes" and name != "llama3":  # which trims replies; others put spaces before letters
            assert read(chat, ids) == whole_text(chat, state)

    check()


def test_ids_that_spell_a_word_otherwise_stay():
    chat = chat_of("chatml")
    state, ids = OPENING, chat.prompt_ids(OPENING)
    said = tuple(i for letter in "hello" for i in chat.tokenizer.encode(letter, add_special_tokens=False))
    assert said != chat.encode("hello")[:-1]
    messages, prompt = one_more(chat, state, ids, (*said, chat.end_id), "No.")
    assert prompt.ids != chat.prompt_ids(messages) and read(chat, prompt.ids) == read(chat, chat.prompt_ids(messages))


@pytest.mark.parametrize("name", EXTENDED)
def test_a_turn_that_was_cut_off_is_ended_by_the_template_and_none_is_ended_twice(name):
    chat = chat_of(name)
    said = chat.encode("Is it big?")
    ids = chat.prompt_ids(OPENING)
    prompts = [one_more(chat, OPENING, ids, turn, "No.")[1] for turn in (said, said[:-1])]
    assert prompts[0] == prompts[1]
    ends = [prompt.ids[len(ids) :].count(chat.end_id) for prompt in prompts]
    whole = chat.prompt_ids((*OPENING, Message("assistant", "Is it big?"), Message("user", "No.")))
    assert ends == [whole[len(ids) :].count(chat.end_id)] * 2


@pytest.mark.parametrize("name", WRITTEN_ANEW)
def test_a_template_that_shows_turns_otherwise_is_written_whole_and_counted(name):
    chat = chat_of(name)
    assert chat.template.opening is None and "shows a turn otherwise" in chat.template.obstacle
    messages, prompt = one_more(chat, OPENING, chat.prompt_ids(OPENING), chat.encode("Is it big?"), "No.")
    assert prompt.retokenised and prompt.ids == chat.prompt_ids(messages)


def test_thoughts_of_former_turns_are_left_out_and_turns_without_any_are_extended():
    chat = chat_of("qwen3")
    ids, thought = chat.prompt_ids(OPENING), "<think>\nSECRET\n</think>\n\nIs it big?"
    messages, prompt = one_more(chat, OPENING, ids, chat.encode(thought), "No.")
    assert prompt.retokenised and prompt.ids == chat.prompt_ids(messages) and "SECRET" not in read(chat, prompt.ids)
    longer, extended = one_more(chat, messages, prompt.ids, chat.encode("Is it red?"), "Yes.")
    assert not extended.retokenised and extended.ids == chat.prompt_ids(longer)


def test_a_template_that_changes_what_stands_before_a_turn_is_found_out_when_it_does():
    """Fails where only the turn itself is looked for, or only the dialogues that are tried at the start count."""
    tokenizer = copy.deepcopy(chat_of("chatml").tokenizer)
    tokenizer.chat_template = "{{ 'won ' if 'Yes' in messages[-1]['content'] else 'not ' }}" + tokenizer.chat_template
    chat = Chat(tokenizer, 10_000)
    ids, said = chat.prompt_ids(OPENING), chat.encode("Is it big?")
    assert chat.template.opening == "" and not one_more(chat, OPENING, ids, said, "No.")[1].retokenised
    messages, prompt = one_more(chat, OPENING, ids, said, "Yes.")
    assert prompt.retokenised and prompt.ids == chat.prompt_ids(messages) and read(chat, prompt.ids).startswith("won ")


@pytest.mark.parametrize("template", ["{{ nothing.at.all }}", "{{ messages[0]['content'] }}", "{{ raise_exception('no') }}"])
def test_a_template_that_can_do_nothing_of_it_is_no_error_at_the_start(template):
    tokenizer = copy.deepcopy(chat_of("chatml").tokenizer)
    tokenizer.chat_template = template
    assert Chat(tokenizer, 100).template.opening is None


@pytest.mark.parametrize("name", EXTENDED)
def test_a_control_token_that_was_sampled_within_a_turn_reaches_no_prompt(name):
    """Fails where sampled ids are kept whatever they are."""
    chat = chat_of(name)
    ids, said = chat.prompt_ids(OPENING), chat.encode("Is it big?")[:-1]
    for token in FAMILIES[name].special:
        hostile = chat.tokenizer.convert_tokens_to_ids(token)
        for turn in ((*said, hostile, chat.end_id), (hostile, *said), (*said, hostile, *said, chat.end_id)):
            messages, prompt = one_more(chat, OPENING, ids, turn, "No.")
            if turn[-1] != chat.end_id or chat.end_id in turn[:-1] or hostile != chat.end_id:
                assert prompt.retokenised and prompt.ids == chat.prompt_ids(messages), token


def hostile_texts(name: str, tokens=None):
    tokens = tokens or FAMILIES[name].control
    parts = [part for token in tokens[:6] for part in (token[:-1], token[1:], token[:2], token[-2:], token[3:-1])]
    return texts([*tokens, *parts, "hello", " "]).filter(bool)


@pytest.mark.parametrize("name", EXTENDED)
def test_no_reply_brings_a_control_token_into_an_extended_prompt(name):
    """Fails where what is new is encoded as it stands, or where pieces of a turn and of a reply make one together."""
    chat = chat_of(name)
    known = {chat.tokenizer.convert_tokens_to_ids(text) for text in FAMILIES[name].control}

    def control(ids):
        return [id for id in ids if id in known]

    @settings(max_examples=25, database=None)
    @given(reply=hostile_texts(name), turn=hostile_texts(name, FAMILIES[name].special), former=hostile_texts(name))
    def check(reply, turn, former):
        state = (Message("user", former),)
        said = tuple(i for letter in turn for i in chat.tokenizer.encode(letter, add_special_tokens=False))
        messages, prompt = one_more(chat, state, chat.prompt_ids(state), (*said, chat.end_id), reply)
        harmless = tuple(Message(message.role, "x") for message in messages)
        assert control(prompt.ids) == control(chat.prompt_ids(harmless))
        if not prompt.retokenised:
            assert prompt.ids[: len(chat.prompt_ids(state)) + len(said)] == (*chat.prompt_ids(state), *said)

    check()


@pytest.mark.parametrize("name", ["chatml", "qwen3", "llama3"])
def test_a_hostile_reply_is_extended_to_what_the_whole_dialogue_has(name):
    chat = chat_of(name)
    for token in FAMILIES[name].control:
        messages, prompt = one_more(
            chat, OPENING, chat.prompt_ids(OPENING), chat.encode("Is it big?"), f"No {token} x{token[:4]}"
        )
        assert not prompt.retokenised and prompt.ids == chat.prompt_ids(messages), token


def test_what_is_none_of_the_dialogue_is_not_taken_for_it():
    chat = chat_of("chatml")
    ids = chat.prompt_ids(OPENING)
    messages = (*OPENING, Message("assistant", "Is it big?"), Message("user", "No."))
    other = chat.encode("Is it red?")
    for wanted in (messages, messages[1:], OPENING, (*messages, Message("user", "x"))):
        (prompt,) = chat.prompts([Wanted(wanted, seen=Seen(ids, other))])
        assert prompt.retokenised and prompt.ids == chat.prompt_ids(wanted)


def test_a_known_prompt_is_taken_as_it_is_and_one_too_long_is_answered_in_its_place():
    chat = Chat(chat_of("chatml").tokenizer, 80)
    ids = chat.prompt_ids(OPENING)
    long = Message("user", "hello " * 60)
    wanted = [
        Wanted(OPENING, 5, Seen((1, 2, 3))),
        Wanted((long,), 5),
        Wanted(OPENING, 5),
        Wanted((*OPENING, Message("assistant", "Is it big?"), long), 5, Seen(ids, chat.encode("Is it big?"))),
        Wanted(OPENING, 78, Seen((1, 2, 3))),
        Wanted((Message("user", "x" * 6000),), 0),
    ]
    made = chat.prompts(wanted)
    assert [isinstance(prompt, PromptTooLong) for prompt in made] == [False, True, False, True, True, True]
    assert made[0].ids == (1, 2, 3) and not made[0].retokenised and made[2].ids == ids
    with pytest.raises(PromptTooLong, match="a prompt of 3 tokens with room for 78 more exceeds the context of 80"):
        raise made[4]


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_several_prompts_at_once_are_those_of_one_after_the_other(name):
    chat = chat_of(name)
    replies = ["No.", "", f"a {FAMILIES[name].control[0]} b", "x " * 50, FAMILIES[name].control[-1]]
    wanted = [
        Wanted(
            (*OPENING, Message("assistant", turn), Message("user", reply)), 3, Seen(chat.prompt_ids(OPENING), chat.encode(turn))
        )
        for turn, reply in itertools.product(["Is it big?", "", "hello"], replies)
    ]
    assert chat.prompts(wanted) == [chat.prompts([each])[0] for each in wanted]


def test_only_what_is_new_is_encoded():
    """Fails where a turn costs what the whole dialogue does."""
    chat = chat_of("chatml")
    encoded: list[int] = []
    encode = chat.template.encode
    state, ids = OPENING, chat.prompt_ids(OPENING)
    chat.template.encode = lambda written: encoded.append(sum(len(w.text) for w in written)) or encode(written)
    try:
        for _ in range(50):
            state, prompt = one_more(chat, state, ids, chat.encode("Is it big?"), "No, it is not.")
            ids = prompt.ids
    finally:
        del chat.template.encode
    assert set(encoded) == {encoded[0]} and len(whole_text(chat, state)) > 30 * encoded[0]
