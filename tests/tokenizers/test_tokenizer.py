from __future__ import annotations

import datetime
import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tokenizer_of
from tokenizers import decoders, models, pre_tokenizers, processors

from fp8rl_jax.errors import UserError
from fp8rl_jax.tokenizers.byte_tokenizer import ByteTokenizer
from fp8rl_jax.tokenizers.tokenizer import HFTokenizer, load_tokenizer

SMOLLM2_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ "
    "'<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% "
    "endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% "
    "endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# what the template of Gemma 3 does: the system message opens the first user turn, the assistant is
# the model, turns alternate
GEMMA_TEMPLATE = (
    "{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}{%- set opening = "
    "messages[0]['content'] + '\n\n' -%}"
    "{%- set turns = messages[1:] -%}{%- else -%}{%- set opening = '' -%}{%- set turns = "
    "messages -%}{%- endif -%}"
    "{%- for turn in turns -%}{%- if (turn['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('roles must alternate') }}{%- endif -%}"
    "{%- set role = 'model' if turn['role'] == 'assistant' else turn['role'] -%}"
    "{{ '<start_of_turn>' + role + '\n' + (opening if loop.first else '') }}"
    "{%- if turn['content'] is string -%}{{ turn['content'] | trim }}"
    "{%- elif turn['content'] is iterable -%}{%- for part in turn['content'] -%}"
    "{%- if part['type'] == 'text' -%}{{ part['text'] | trim }}{%- endif -%}{%- endfor -%}"
    "{%- else -%}{{ raise_exception('invalid content') }}{%- endif -%}"
    "{{ '<end_of_turn>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"
)
USER = [{"role": "user", "content": "hi"}]


def write_tokenizer(directory, config=None, template=None, bos=False):
    vocabulary = {
        token: i
        for i, token in enumerate(["<s>", "</s>", "<unk>", "a", "b", "ab", "Ġ", "Ċ", "h", "i"])
    }
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [("a", "b")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    directory.mkdir(exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


def test_encode_decode_and_special_tokens(tmp_path):
    config = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "special": True},
        "unk_token": "<unk>",
    }
    tokenizer = tokenizer_of(write_tokenizer(tmp_path, config, bos=True))
    assert tokenizer.encode("ab a") == [0, 5, 6, 3]
    assert tokenizer.encode("ab a</s>", add_special_tokens=False) == [5, 6, 3, 1]
    assert tokenizer.decode([0, 5, 6, 3, 1]) == "ab a"
    assert tokenizer.decode([0, 5, 6, 3, 1], skip_special=False) == "<s>ab a</s>"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.vocab_size) == (0, (1,), 10)
    assert tokenizer.pad_token_id == 1  # no padding token: an end token pads


def test_a_tokenizer_without_config_has_no_special_roles(tmp_path):
    tokenizer = tokenizer_of(write_tokenizer(tmp_path))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.pad_token_id) == (
        None,
        (),
        None,
    )
    assert not tokenizer.has_chat_template
    with pytest.raises(UserError, match="no chat template"):
        tokenizer.apply_chat_template(USER)


def test_load_tokenizer_of_a_directory_without_one(tmp_path):
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(UserError, match="tokenizer.model: only tokenizer.json is read"):
        load_tokenizer(tmp_path)


def test_smollm2_template_adds_its_system_prompt(tmp_path):
    config = {"bos_token": "<s>", "chat_template": SMOLLM2_TEMPLATE}
    tokenizer = tokenizer_of(write_tokenizer(tmp_path, config))
    assert tokenizer.apply_chat_template(USER) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
        "Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    system = [{"role": "system", "content": "Be brief."}, *USER]
    assert tokenizer.apply_chat_template(system, add_generation_prompt=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    )


TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
    {% if message.role == 'stop' %}{% break %}{% endif %}
    [{{ message.role }}] {{ message.content | trim }}
    {% if message.extra %}
{{ message.extra | tojson }} {{ message.extra | tojson(indent=2) }}
    {% endif %}
{%- endfor %}
{% if add_generation_prompt %}
[assistant]{% endif %}
"""


def test_gemma_template_merges_the_system_message_and_trims(tmp_path):
    """The texts are those of transformers 5.23.0."""
    tokenizer = tokenizer_of(
        write_tokenizer(tmp_path, {"bos_token": "<s>", "chat_template": GEMMA_TEMPLATE})
    )
    talk = [
        {"role": "system", "content": "Be brief. "},
        {"role": "user", "content": " 1+1? "},
        {"role": "assistant", "content": "2\n"},
        {"role": "user", "content": [{"type": "text", "text": " why? "}]},
    ]
    turns = "1+1?<end_of_turn>\n<start_of_turn>model\n2<end_of_turn>\n<start_of_turn>user\nwhy?<end_of_turn>\n"
    assert tokenizer.apply_chat_template(talk) == (
        f"<s><start_of_turn>user\nBe brief. \n\n{turns}<start_of_turn>model\n"
    )
    assert (
        tokenizer.apply_chat_template(talk[1:], add_generation_prompt=False)
        == f"<s><start_of_turn>user\n{turns}"
    )
    with pytest.raises(UserError, match="roles must alternate"):
        tokenizer.apply_chat_template(talk[2:])


def test_template_environment_is_that_of_transformers(tmp_path):
    # The expected text was rendered by transformers 5.23.0.
    tokenizer = tokenizer_of(write_tokenizer(tmp_path, {"bos_token": "<s>"}, TEMPLATE))
    messages = [
        {"role": "user", "content": "  <b> & é ", "extra": {"k": ["<é>", 1.5, None]}},
        {"role": "assistant", "content": "ok"},
        {"role": "stop"},
        {"role": "user", "content": "never"},
    ]
    expected = (
        '<s>    [user] <b> & é\n{"k": ["<é>", 1.5, null]} {\n  "k": [\n    "<é>",\n    1.5,\n    '
        "null\n  ]\n}\n"
        "    [assistant] ok\n"
    )
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False) == expected
    assert tokenizer.apply_chat_template(messages) == expected + "[assistant]"


def test_encode_chat_adds_no_second_bos(tmp_path):
    template = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer = tokenizer_of(write_tokenizer(tmp_path, {"bos_token": "<s>"}, template, bos=True))
    assert tokenizer.encode_chat([{"role": "user", "content": "ab"}]) == [0, 5]


def test_template_file_goes_before_config_and_default_before_others(tmp_path):
    config = {
        "chat_template": [
            {"name": "tool", "template": "tool"},
            {"name": "default", "template": "default"},
        ]
    }
    assert tokenizer_of(write_tokenizer(tmp_path, config)).apply_chat_template(USER) == "default"
    assert (
        tokenizer_of(write_tokenizer(tmp_path, config, "file")).apply_chat_template(USER) == "file"
    )


def test_strftime_now(tmp_path):
    tokenizer = tokenizer_of(write_tokenizer(tmp_path, template="{{ strftime_now('%Y') }}"))
    assert abs(int(tokenizer.apply_chat_template(USER)) - datetime.datetime.now().year) <= 1


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", USER, "roles must alternate"),
        ("{{ messages[0].content + 1 }}", USER, "fails on these messages"),
        ("{{ messages[7].content.text }}", USER, "fails on these messages"),
        ("{{ 1 / 0 }}", USER, "fails on these messages"),
        ("{{ ''.__class__.__mro__ }}", USER, "fails on these messages"),
        ("{{ messages.append(1) }}", USER, "fails on these messages"),
        ("hi", ["hi"], "messages[0] must be an object"),
        ("hi", [{"content": "x"}], "messages[0] must be an object with a role"),
    ],
)
def test_refused_messages_name_the_template(template, messages, message, tmp_path):
    tokenizer = tokenizer_of(write_tokenizer(tmp_path, template=template))
    with pytest.raises(UserError) as error:
        tokenizer.apply_chat_template(messages)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("config", "template", "message"),
    [
        ({"eos_token": "</eos>"}, None, "eos_token '</eos>'"),
        ({"eos_token": 3}, None, "tokenizer_config.json: eos_token must be"),
        ({"eos_token": {"content": "</s>", "lstrip": 1}}, None, "json: eos_token must be"),
        ({"eos_token": ""}, None, "eos_token '' is not in the vocabulary"),
        ({"extra_special_tokens": "<s>"}, None, "json: extra_special_tokens must be a list"),
        ({"additional_special_tokens": [None]}, None, "json: additional_special_tokens must be"),
        ({"added_tokens_decoder": None}, None, "json: added_tokens_decoder must be an object"),
        ({"added_tokens_decoder": {"x": "a"}}, None, "json: added_tokens_decoder must be an"),
        ({"added_tokens_decoder": {"1": None}}, None, "json: added_tokens_decoder holds a null"),
        (
            {"added_tokens_decoder": {"12": {"content": "<new>"}}},
            None,
            "token '<new>' has id 12, and beside tokenizer.json it gets 10",
        ),
        ({"split_special_tokens": "no"}, None, "split_special_tokens must be true or false"),
        ({"chat_template": 3}, None, "tokenizer_config.json: chat_template must be a string"),
        ({"chat_template": [{"name": "tool", "template": "x"}]}, None, "'default'"),
        ({}, "{% for x in %}", "chat_template.jinja: the chat template is not valid Jinja"),
    ],
)
def test_malformed_tokenizer_files(config, template, message, tmp_path):
    with pytest.raises(UserError) as error:
        tokenizer_of(write_tokenizer(tmp_path, config, template)).encode_chat(USER)
    assert message in str(error.value)


def test_corrupt_tokenizer_json(tmp_path):
    path = write_tokenizer(tmp_path) / "tokenizer.json"
    for content in (b"", b"{}", path.read_bytes()[:-30], b"\xff\xfe"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"tokenizer.json: not "):
            load_tokenizer(tmp_path)


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    write_tokenizer(tmp_path)
    assert tokenizer_of(tmp_path, vocab_size=10).vocab_size == 10
    with pytest.raises(UserError, match="token 'i' has id 9, but the model's vocab_size is 9"):
        load_tokenizer(tmp_path, vocab_size=9)


def test_added_tokens_may_be_outside_of_the_model(tmp_path):
    config = {
        "eos_token": "</s>",
        "pad_token": "<image>",
        "added_tokens_decoder": {"10": {"content": "<image>", "special": True}},
    }
    tokenizer = tokenizer_of(write_tokenizer(tmp_path, config), vocab_size=10)
    assert tokenizer.vocab_size == len(tokenizer.token_bytes()) == 10
    assert (tokenizer.encode("ab"), tokenizer.pad_token_id) == ([5], 1)
    with pytest.raises(UserError, match="the token '<image>', whose id 10 is outside of .* of 10"):
        tokenizer.encode("a<image>")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<image>"}))
    with pytest.raises(UserError, match="token '<image>' has id 10, but the model's vocab_size"):
        load_tokenizer(tmp_path, vocab_size=10)
    assert tokenizer_of(tmp_path).eos_token_ids == (10,)


def test_a_plain_prompt_asks_for_no_template(tmp_path):
    tokenizer = tokenizer_of(write_tokenizer(tmp_path, template="{% for x in %}"))
    assert tokenizer.encode("ab") == [5]
    with pytest.raises(UserError, match=r"chat_template\.jinja: the chat template is not valid"):
        assert tokenizer.has_chat_template


def test_the_template_of_a_processor_is_the_last_that_is_asked_for(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.json").write_text('{"chat_template": "of the processor"}')
    assert tokenizer_of(tmp_path).apply_chat_template(USER) == "of the processor"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "default.jinja").write_text("of the folder")
    write_tokenizer(tmp_path, template="of the file")
    assert tokenizer_of(tmp_path).apply_chat_template(USER) == "of the folder"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"add_bos_token": True}, "add_bos_token = true has no effect"),
        ({"add_bos_token": False}, ""),
        ({"add_bos_token": True, "bos_token": "<s>"}, "add_bos_token = true has no effect"),
        ({"add_eos_token": True, "eos_token": "</s>"}, "add_eos_token = true has no effect"),
        ({"add_prefix_space": True}, "add_prefix_space = true has no effect"),
        ({"add_prefix_space": False, "add_eos_token": None}, ""),
        ({"clean_up_tokenization_spaces": True}, "clean_up_tokenization_spaces = true has no"),
    ],
)
def test_settings_that_have_no_effect_are_told(config, said, tmp_path, caplog):
    tokenizer_of(write_tokenizer(tmp_path, config))
    assert len(caplog.records) == bool(said) and said in caplog.text


def test_a_bos_that_is_an_eos_too_is_no_end(tmp_path, caplog):
    config = {"bos_token": "<s>", "eos_token": "<s>", "add_bos_token": True, "add_eos_token": False}
    tokenizer_of(write_tokenizer(tmp_path, config, bos=True))
    assert not caplog.records


@pytest.mark.parametrize(
    ("listed", "eos", "used"), [({}, 1, "second"), ({"added_tokens_decoder": {}}, 0, "first")]
)
def test_two_files_that_name_different_tokens_are_told(listed, eos, used, tmp_path, caplog):
    write_tokenizer(tmp_path, {"eos_token": "<s>"} | listed)
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "</s>", "pad_token": "<unk>"}')
    assert tokenizer_of(tmp_path).eos_token_ids == (eos,)
    (record,) = caplog.records
    assert "eos_token is '<s>' in tokenizer_config.json and '</s>' in" in record.getMessage()
    assert f"the {used} is used" in record.getMessage()


def test_a_tokenizer_that_encodes_at_random_is_refused(tmp_path):
    path = write_tokenizer(tmp_path) / "tokenizer.json"
    data = json.loads(path.read_text())
    data["model"]["dropout"] = 0.1
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match=r"tokenizer\.json: model\.dropout = 0\.1"):
        load_tokenizer(tmp_path)


def test_bytes_of_a_text_that_is_cleaned_up_are_not_known(tmp_path):
    config = {
        "clean_up_tokenization_spaces": True,
        "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True,
    }
    with pytest.raises(UserError, match="with clean_up_tokenization_spaces the text"):
        tokenizer_of(write_tokenizer(tmp_path, config)).token_bytes()


def test_byte_tokenizer_ids():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("é") == [257, 0xC3, 0xA9]
    assert tokenizer.encode("<|eos|>", add_special_tokens=False) == list(b"<|eos|>")
    assert tokenizer.decode([257, 0xC3, 0xA9, 258, 256]) == "é"
    assert tokenizer.decode([257, 65, 258], skip_special=False) == "<|bos|>A<|eos|>"
    assert tokenizer.decode([65, 0xC3, 66]) == "A\N{REPLACEMENT CHARACTER}B"
    assert tokenizer.vocab_size == 1 + max(
        tokenizer.pad_token_id, tokenizer.bos_token_id, *tokenizer.eos_token_ids
    )
    with pytest.raises(UserError, match="no chat template"):
        tokenizer.encode_chat(USER)


@pytest.fixture(scope="module")
def saved_bytes(tmp_path_factory):
    directory = tmp_path_factory.mktemp("bytes")
    ByteTokenizer().save(directory)
    return tokenizer_of(directory, 259)


@given(
    text=st.text(st.characters(exclude_categories=["Cs"])),
    ids=st.lists(st.integers(0, 258), max_size=12),
)
def test_saved_byte_tokenizer_is_the_same_tokenizer(saved_bytes, text, ids):
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert saved_bytes.encode(text) == tokenizer.encode(text)
    assert saved_bytes.decode(ids) == tokenizer.decode(ids)
    for name in ("bos_token_id", "eos_token_ids", "pad_token_id", "vocab_size"):
        assert getattr(saved_bytes, name) == getattr(tokenizer, name)


@pytest.mark.parametrize(
    "make", [lambda path: ByteTokenizer(), lambda path: HFTokenizer(write_tokenizer(path))]
)
def test_a_lone_surrogate_is_one_line(make, tmp_path):
    with pytest.raises(UserError, match=r"lone surrogate, \\ud800, at 1"):
        make(tmp_path).encode("a\ud800")
