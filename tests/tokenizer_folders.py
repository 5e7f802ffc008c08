"""Folders of tokenizer files, and chat templates; tokenizers/reference.json holds what transformers
makes of them.

`python tests/tokenizer_folders.py` writes it, in an environment that has transformers.
"""

from __future__ import annotations

import copy
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

REFERENCE = Path(__file__).parent / "tokenizers" / "reference.json"
WORDS = ["<s>", "</s>", "<unk>", "<pad>", "<bos>", "<eos>", "<mask>", "<|endoftext|>", "<x>", "<y>"]
WORDS += ["a", "b", "ab", "Ġ", "h", "i"]
TEXTS = ["ab a", " <x>i </s><y>a", "<new><|endoftext|>", "<pad>", ""]
IDS = [*range(len(WORDS) + 3)]


def tokenizer_json(bos: bool = False, words: bool = False) -> dict[str, Any]:
    """Byte-level BPE whose first two tokens are special, and a bos before each text if asked.

    Or, with `words`, whole words, which a decoder joins with spaces.
    """
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    if words:
        vocabulary |= {mark: len(WORDS) + i for i, mark in enumerate((".", "n't", "'"))}
        backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        backend.decoder = decoders.WordPiece("##", cleanup=False)
    else:
        backend = tokenizers.Tokenizer(models.BPE(vocabulary, [("a", "b")], unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
        )
    return json.loads(backend.to_str())


def special(content: str, **flags: bool) -> dict[str, Any]:
    """A token as a file of transformers has it."""
    plain = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": content} | plain | {"special": True} | flags


ADDED = {"0": special("<s>"), "1": special("</s>")}
CUT = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
FILLED = {
    "strategy": {"Fixed": 8},
    "direction": "Left",
    "pad_to_multiple_of": None,
    "pad_id": 3,
    "pad_type_id": 0,
    "pad_token": "<pad>",
}
ABSENT = "absent"


def _without(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value != ABSENT}


def _folders() -> dict[str, dict[str, Any]]:
    """File name -> content, for each folder; "tokenizer.json" holds what differs from the usual."""
    config, over, added = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
    folders: dict[str, dict[str, Any]] = {"nothing": {}}
    typed = special("<x>", lstrip=True) | {"__type": "AddedToken"}
    # every place of a token, absent, null, and with a value
    for role, here, there, decoder in itertools.product(
        ("bos", "eos", "pad", "unk", "mask"),
        (ABSENT, None, "<x>", typed),
        ("no file", ABSENT, None, "<y>", special("<y>", rstrip=True)),
        (False, True),
    ):
        few = isinstance(here, dict) or isinstance(there, dict) or there == "no file" or decoder
        if few and role != "eos":
            continue
        key, files = f"{role}_token", {}
        files[config] = _without({key: here}) | ({"added_tokens_decoder": ADDED} if decoder else {})
        if there != "no file":
            files[over] = _without({key: there})
        shown = [x["content"] + " object" if isinstance(x, dict) else x for x in (here, there)]
        folders[f"{key} {shown[0]}, map {shown[1]}{', decoder' * decoder}"] = files
    # what a class has where nothing is said
    classes = ("PreTrainedTokenizerFast", "LlamaTokenizer", "Qwen2TokenizerFast", "GPT2Tokenizer")
    for name, said in itertools.product(
        (*classes, "GemmaTokenizerFast", "Unknown"), (ABSENT, None)
    ):
        files = {config: _without({"tokenizer_class": name, "eos_token": said, "pad_token": said})}
        folders[f"class {name}, {said}"] = files
        spaced = {
            "type": "Metaspace",
            "replacement": "_",
            "prepend_scheme": "first",
            "split": False,
        }
        files = files | {"tokenizer.json": {"pre_tokenizer": spaced, "decoder": spaced}}
        folders[f"class {name}, {said}, not of bytes"] = files
    for kind in ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "gemma3_text"):
        folders[f"model {kind}"] = {"config.json": {"model_type": kind}}
        for name in ("GPT2Tokenizer", "PreTrainedTokenizerFast"):
            folders[f"model {kind}, class {name}"] = {
                "config.json": {"model_type": kind},
                config: {"tokenizer_class": name},
            }
    # what tokenizer.json holds of earlier calls
    for cut, fill in ((CUT, None), (None, FILLED), (CUT, FILLED)):
        for said in (ABSENT, None, "<x>"):
            folders[f"cut {bool(cut)}, filled {bool(fill)}, pad_token {said}"] = {
                "tokenizer.json": {"truncation": cut, "padding": fill},
                config: _without({"pad_token": said}),
            }
    # settings
    for key, value, bos in itertools.product(
        ("add_bos_token", "add_eos_token"), (None, False, True), (False, True)
    ):
        folders[f"{key} {value}, bos in tokenizer.json {bos}"] = {
            "tokenizer.json": {"bos": bos},
            config: {key: value, "bos_token": "<s>", "eos_token": "</s>"},
        }
    cleans = "clean_up_tokenization_spaces"
    for value, words in itertools.product((ABSENT, None, False, True), (False, True)):
        folders[f"{cleans} {value}, words {words}"] = {
            "tokenizer.json": {"words": words},
            config: _without({cleans: value}),
        }
    folders[f"{cleans} of BPE all the same"] = {
        config: {
            cleans: True,
            f"{cleans}_for_bpe_even_though_it_will_corrupt_output": True,
        }
    }
    for value in (False, True):
        folders[f"split_special_tokens {value}"] = {config: {"split_special_tokens": value}}
    for key, value in {
        "model_max_length": 2,
        "padding_side": "left",
        "truncation_side": "left",
        "add_prefix_space": True,
        "model_input_names": ["input_ids"],
    }.items():
        folders[f"{key} {value}"] = {config: {key: value}}
    # tokens that tokenizer.json lacks, or has as words
    for key, value in itertools.product(
        ("extra_special_tokens", "additional_special_tokens"), (None, [], ["<x>"], ["<x>", "<new>"])
    ):
        folders[f"{key} {value}"] = {config: {key: value}}
        folders[f"{key} {value}, decoder"] = {config: {key: value, "added_tokens_decoder": ADDED}}
        folders[f"map {key} {value}"] = {over: {key: value}}
    folders["both kinds of extra"] = {
        config: {"extra_special_tokens": ["<x>"], "additional_special_tokens": ["<y>"]}
    }
    folders["extra with names"] = {config: {"extra_special_tokens": {"image_token": "<x>"}}}
    folders["map extra with names"] = {over: {"extra_special_tokens": {"image_token": "<x>"}}}
    folders["tokens of other names"] = {config: {"image_token": "<x>", "sep_token": "<y>"}}
    folders["map tokens of other names"] = {over: {"image_token": "<x>", "cls_token": "<y>"}}
    folders["added_tokens.json"] = {added: {"<new>": 16, "<x>": 8}}
    folders["added_tokens.json, special"] = {added: {"<new>": 16}, config: {"eos_token": "<new>"}}
    folders["added_tokens.json, decoder"] = {
        added: {"<new>": 16},
        config: {"added_tokens_decoder": ADDED},
    }
    for flag in ("special", "lstrip", "rstrip", "normalized", "single_word"):
        for value in (False, True):
            listed = ADDED | {
                "8": special("<x>") | {flag: value},
                "16": special("<new>") | {flag: value},
            }
            folders[f"decoder {flag} {value}"] = {config: {"added_tokens_decoder": listed}}
    folders["decoder that is not special, named"] = {
        config: {
            "eos_token": "<new>",
            "added_tokens_decoder": ADDED | {"16": special("<new>", special=False)},
        }
    }
    folders["decoder empty"] = {config: {"added_tokens_decoder": {}, "eos_token": "</s>"}}
    return folders


FOLDERS = _folders()
CHAT = "tokenizer_config.json", "chat_template.jinja", "additional_chat_templates/tool.jinja"
PLACES: dict[str, dict[str, Any]] = {
    f"config {config}, file {file}, folder {folder}": _without(
        {
            CHAT[0]: {"chat_template": config} if config != ABSENT else {},
            CHAT[1]: file,
            CHAT[2]: folder,
        }
    )
    for config, file, folder in itertools.product(
        (
            ABSENT,
            None,
            "config",
            [{"name": "tool", "template": "config tool"}],
            [{"name": "tool", "template": "x"}, {"name": "default", "template": "config default"}],
            {"default": "config default"},
        ),
        (ABSENT, "file"),
        (ABSENT, "folder"),
    )
}
"""Where a chat template may stand."""

_USER = {"role": "user", "content": "Hi <b>é</b>"}
_CALL = {"type": "function", "function": {"name": "add", "arguments": {"b": 1.5, "a": [None]}}}
CHATS: dict[str, list[dict[str, Any]]] = {
    "turns": [
        {"role": "system", "content": " Be brief. "},
        _USER,
        {"role": "assistant", "content": "2\n"},
        {"role": "user", "content": "why?"},
    ],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}],
    "tools": [
        _USER,
        {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        {"role": "tool", "name": "add", "content": "3", "tool_call_id": None},
    ],
    "nulls": [{"role": "user", "content": None, "name": None}, {"role": "user", "content": ""}],
    "absent": [{"role": "user"}],
    "thoughts": [
        _USER,
        {"role": "assistant", "content": "2", "thinking": "1 + 1", "reasoning": ""},
    ],
    "other thoughts": [_USER, {"role": "assistant", "content": "2", "reasoning": "r"}],
    "no thoughts": [_USER, {"role": "assistant", "content": "2", "reasoning_content": None}],
    "empty": [],
}
_EACH = "{% for m in messages %}"
_TURNS = "\n  {% for m in messages %}\n    {%- if loop.first %} first {% endif %}\n"
TEMPLATES: dict[str, str] = {
    "plain": _EACH + "[{{ m.role }}|{{ m['content'] }}]{% endfor %}",
    "joined": _EACH + "{{ m['role'] + ':' + m['content'] }}{% endfor %}",
    "defined": "{{ [tools is defined, tools is none, documents is defined, documents is none, "
    "messages is defined, add_generation_prompt is defined, xml_tools is defined] }}",
    "falsy": "{% if tools %}t{% endif %}{% if documents %}d{% endif %}{{ tools }}{{ other }}",
    "tokens": "{{ bos_token }}{{ eos_token }}{{ pad_token }}|{{ unk_token }}|{{ image_token }}|"
    "{{ unk_token is defined }}{{ extra_special_tokens is defined }}",
    "generation prompt": "{{ add_generation_prompt }}{% if add_generation_prompt %}A{% endif %}",
    "generation": _EACH + "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "generation dashed": _EACH
    + " {%- generation -%} \n x {{ m.role }} \n{%- endgeneration -%} \n{% endfor %}",
    "generation scope": "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    "generation namespace": "{% set n = namespace(x=1) %}{% generation %}{% set n.x = 2 %}"
    "{% endgeneration %}{{ n.x }}",
    "generation in a loop": _EACH + "{% generation %}{{ loop.index0 }}{{ m.role }}\n"
    "{% endgeneration %}\n{% endfor %}",
    "generation unclosed": "{% generation %}x",
    "endgeneration alone": "x{% endgeneration %}",
    "break in generation": _EACH + "{% generation %}{% break %}{% endgeneration %}{% endfor %}",
    "break": _EACH + "{% if loop.index0 == 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "continue": _EACH
    + "{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
    "break outside": "{% break %}",
    "blocks": _TURNS + "    {{ m.role }}\n  {% endfor %}\n\n  end\n",
    "comments": "a {# b #}\n  {# c #}\nd\n",
    "plus": "a\n  {%+ if true %}\nb\n{%+ endif +%}\nc",
    "tojson": _EACH
    + "{{ m | tojson }}{{ m | tojson(indent=2) }}{{ m|tojson(ensure_ascii=True) }}{% endfor %}",
    "tojson options": "{{ messages | tojson(separators=(',', ':'), sort_keys=True) }}"
    "{{ {'z': 1, 'a': '<&>\\u00e9'} | tojson(sort_keys=true, indent=1) }}",
    "tojson positions": "{{ messages[0] | tojson(true, 3) }}",
    "tojson unknown option": "{{ messages[0] | tojson(skipkeys=True) }}",
    "tojson of undefined": "{{ nothing | tojson }}",
    "tool calls": _EACH + "{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.name }}"
    "({{ c['function'].arguments | tojson }}){% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "fields": _EACH
    + "{{ m.keys() | list }}{{ 'content' in m }}{{ m.content is none }}{% endfor %}",
    "parts": _EACH + "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ p.type }}{{ p.text }}{% endfor %}{% endif %}{% endfor %}",
    "thoughts": _EACH + "{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.reasoning }};{% endfor %}",
    "raise": "{{ raise_exception('roles must alternate') }}",
    "raise some": _EACH
    + "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{% endfor %}",
    "namespace": "{% set n = namespace(found=false) %}" + _EACH + "{% set n.found = loop.index %}"
    "{% endfor %}{{ n.found }}",
    "namespace self": "{% set n = namespace(self=1) %}{{ n.self }}",
    "namespace of a dict": "{% set n = namespace({'a': 1}, b=2) %}{{ n.a }}{{ n.b }}",
    "namespace underscore": "{% set n = namespace(_a=1) %}{{ n._a }}",
    "namespace set underscore": "{% set n = namespace() %}{% set n._a = 1 %}{{ n._a }}",
    "dict": "{{ dict(a=1) | tojson }}{{ dict([('b', 2)]).b }}{{ dict.fromkeys(['x'], 0) }}",
    "range": "{% for i in range(3) %}{{ i }}{{ cycler('a', 'b').next() }}{% endfor %}{{ joiner()() }}",
    "macro": "{% macro f(x, y='d') %}<{{ x }}{{ y }}{{ caller is defined }}>{% endmacro %}{{ f(1) }}{{ f(1, y=2) }}",
    "call": "{% macro f() %}({{ caller() }}){% endmacro %}{% call f() %}in{% endcall %}",
    "filters": "{{ messages[0].content | trim | upper }}{{ messages | length }}{{ messages | map(attribute='role')"
    " | join(',') }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
    "slices": "{% set loop_messages = messages[1:] %}{{ loop_messages | length }}{{ messages[-1].role }}"
    "{{ messages[::-1][0].role }}",
    "methods": "{{ 'a b'.split()[-1] }}{{ 'x.y'.rstrip('y').lstrip('x') }}{{ messages[0].get('name', 'none') }}"
    "{{ messages[0].items() | list | length }}",
    "sandbox": "{{ ''.__class__.__mro__ }}",
    "mutation": "{{ messages.append(1) }}",
    "mutation of a new list": "{% set l = [] %}{{ l.append(1) }}{{ l }}",
    "mutation of a dict": "{% set d = {} %}{{ d.update({'a': 1}) }}{{ d }}",
    "include": "{% include 'x' %}",
    "import": "{% import 'x' as x %}",
    "unknown tag": "{% nothing %}",
    "unknown filter": "{{ 1 | nothing }}",
    "unknown function": "{{ nothing() }}",
    "undefined attribute": "{{ nothing.a }}",
    "undefined is empty": "[{{ nothing }}{{ messages[0].nothing }}]",
    "division": "{{ 1 / 0 }}",
    "do": "{% do messages %}",
    "autoescape": "{{ '<&>' }}{{ '<&>' | e }}{{ messages[0] | string }}",
    "unicode": "é 漢 \U0001f600 {{ 'é' }}{{ '\\u00e9' }}",
    "true and none": "{{ true }}{{ none }}{{ True }}{{ None }}{{ 1.0 }}{{ 10 // 3 }}",
}


def _chats() -> dict[str, tuple[str, str, bool]]:
    """(template, chat, generation prompt): every template on one chat, and the two that depend on
    what messages hold on every chat."""
    pairs = [(name, "turns") for name in TEMPLATES]
    reading = (
        "plain",
        "joined",
        "fields",
        "parts",
        "thoughts",
        "tool calls",
        "tojson",
        "raise some",
    )
    pairs += [(name, chat) for name in reading for chat in CHATS if chat != "turns"]
    pairs += [("generation", "tools"), ("generation", "nulls"), ("filters", "parts")]
    chats = {f"{name} on {chat}": (name, chat, False) for name, chat in pairs}
    return chats | {"generation prompt, asked for": ("generation prompt", "turns", True)}


RENDERED = _chats()
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": None, "image_token": "<x>"}
"""What tokenizer_config.json says where RENDERED is rendered."""


def write(folder: dict[str, Any], directory: Path) -> Path:
    """Write one of FOLDERS."""
    files = copy.deepcopy(folder)
    changes = files.pop("tokenizer.json", {})
    made = {key: changes.pop(key) for key in ("bos", "words") if key in changes}
    files["tokenizer.json"] = tokenizer_json(**made) | changes
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


def _answer(tokenizer: Any) -> dict[str, Any]:
    return {
        "special": tokenizer.special_tokens_map,
        "ids": [getattr(tokenizer, f"{role}_token_id") for role in ("bos", "eos", "pad")],
        "encoded": [tokenizer.encode(text) for text in TEXTS],
        "plain": tokenizer.encode(TEXTS[0], add_special_tokens=False),
        "decoded": [tokenizer.decode(IDS, skip_special_tokens=skip) for skip in (True, False)],
    }


def _rendered(tokenizer: Any, chat: list[dict[str, Any]], prompt: bool) -> str | None:
    """None where it fails."""
    try:
        return tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
    except Exception:
        return None


def main() -> None:
    import transformers

    def load(folder: dict[str, Any]) -> Any:
        with tempfile.TemporaryDirectory() as directory:
            return transformers.AutoTokenizer.from_pretrained(write(folder, Path(directory)))

    answers = {name: _answer(load(folder)) for name, folder in FOLDERS.items()}
    usual = answers["nothing"]
    for name, answer in answers.items():
        if name != "nothing":
            answers[name] = {key: x for key, x in answer.items() if x != usual[key]}
    places = {
        name: _rendered(load(folder), CHATS["turns"], False) for name, folder in PLACES.items()
    }
    rendered = {}
    for name, (template, chat, prompt) in RENDERED.items():
        folder = {"tokenizer_config.json": NAMED, "chat_template.jinja": TEMPLATES[template]}
        rendered[name] = _rendered(load(folder), CHATS[chat], prompt)
    parts = {"folders": answers, "places": places, "rendered": rendered}
    tables = [
        f'"{part}": {{\n'
        + ",\n".join(f"{json.dumps(name)}: {json.dumps(x)}" for name, x in table.items())
        + "\n}"
        for part, table in parts.items()
    ]
    versions = [f'"{x.__name__}": "{x.__version__}"' for x in (transformers, tokenizers)]
    REFERENCE.write_text("{\n" + ",\n".join(versions + tables) + "\n}\n")


if __name__ == "__main__":
    main()
