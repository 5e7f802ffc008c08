"""`fp8rl generate --interactive` before a scripted terminal, and once before a real one."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from offline_models import call, make_model

from fp8rl_jax.cli import chat, main
from fp8rl_jax.cli.chat import Chat
from fp8rl_jax.cli.generate import GenerateArguments, make_sampling
from fp8rl_jax.errors import UserError
from fp8rl_jax.tokenizers.byte_tokenizer import ByteTokenizer

FLAGS = ("--compute-dtype", "float32", "--max-new-tokens", "12", "--temperature", "1")
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}<{{ m.content }}>{% endfor %}{% if "
    "add_generation_prompt %}A{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), tokenizer=True, eos_token_ids=(258,))


@pytest.fixture(scope="module")
def templated(tmp_path_factory):
    directory = make_model(
        tmp_path_factory.mktemp("templated"), tokenizer=True, eos_token_ids=(258,)
    )
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def make_chat(directory, write=lambda text: None, **settings):
    arguments = GenerateArguments(
        str(directory),
        interactive=True,
        max_new_tokens=12,
        temperature=1.0,
        compute_dtype="float32",
        **settings,
    )
    opened = arguments.open()
    return Chat(opened, make_sampling(arguments, opened), arguments.stop, 0, write)


def type_lines(monkeypatch, *lines):
    """Lines as the user would type them; an exception is a key, and the end is Ctrl-D."""
    script = iter(lines)

    def read(prompt=""):
        line = next(script, EOFError)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)


def test_turns_are_the_lines_of_a_file(model, tmp_path):
    lines = ["2 + 2 =", "hello", "b"]
    answers = call("generate", model, [{"prompt": line} for line in lines], tmp_path, *FLAGS)
    pieces = []
    talk = make_chat(model, pieces.append)
    for line, answer in zip(lines, answers, strict=True):
        pieces.clear()
        assert talk.answer(line) == answer["completion_tokens"]
        assert len(pieces) == 13  # one a token, and what was held back
        assert talk.messages[-1] == {"role": "assistant", "content": answer["text"]}
        assert "".join(pieces) == answer["text"].translate(chat._PRINTABLE) + "\n"


def test_a_template_sees_the_whole_conversation(templated, tmp_path, monkeypatch):
    talk = make_chat(templated)
    seen = []
    monkeypatch.setattr(
        talk, "_encode", lambda text, encode=talk._encode: seen.append(encode(text)) or seen[-1]
    )
    talk.answer("hi")
    said = talk.messages[-1]["content"]
    talk.answer("you")
    decode = ByteTokenizer().decode
    assert decode(seen[0]) == "u<hi>A" and decode(seen[1]) == f"u<hi>a<{said}>u<you>A"
    with pytest.raises(
        UserError,
        match=r"tokens and 12 new ones are more than the model's 128 positions; /new begins",
    ):
        talk.answer("x" * 100)
    assert len(talk.messages) == 4
    talk.begin()
    talk.answer("new")
    assert decode(seen[-1]) == "u<new>A"


def test_what_is_not_said_suits_a_conversation_and_a_cpu(model):
    """float32, and answers of 256 tokens, or of half the positions where that is less."""
    asked = GenerateArguments(str(model), interactive=True)
    opened = asked.open()
    assert opened.dtype == "float32" and make_sampling(asked, opened).max_new_tokens == 64
    long = replace(opened, config=replace(opened.config, max_position_embeddings=8192))
    assert make_sampling(asked, long).max_new_tokens == 256
    assert make_sampling(GenerateArguments(str(model)), long).max_new_tokens == 64
    said = replace(asked, compute_dtype="bfloat16", max_new_tokens=300)
    assert said.open().dtype == "bfloat16" and make_sampling(said, long).max_new_tokens == 300


def test_a_stop_string_is_neither_shown_nor_kept(model):
    free, pieces = make_chat(model), []
    tokens = free.answer("2 + 2 =")
    stop = bytes(tokens[1:4]).decode()
    cut = make_chat(model, pieces.append, stop=(stop,))
    assert cut.answer("2 + 2 =") == tokens[:4]
    assert pieces == [chr(tokens[0]), "", "", "", "\n"] and cut.messages[-1]["content"] == chr(
        tokens[0]
    )


def test_ctrl_c_ends_a_completion_and_keeps_it(model):
    pieces = []

    def write(text):
        pieces.append(text)
        if len(pieces) == 3:
            raise KeyboardInterrupt

    talk = make_chat(model, write)
    tokens = talk.answer("2 + 2 =")
    assert len(tokens) == 3 and talk.messages[-1]["content"] == ByteTokenizer().decode(tokens)
    assert len(talk.answer("hello")) == 12


def test_the_loop_reads_commands_and_keys(model, monkeypatch, capsys):
    loop = ["generate", "--interactive", "--model", str(model), *FLAGS]
    type_lines(
        monkeypatch,
        "hello",
        "",
        KeyboardInterrupt,
        "\udc80",
        "/new",
        "x" * 200,
        "hello",
        "/exit",
        "never read",
    )
    assert main.main(loop) == 0
    out = capsys.readouterr().out
    assert (
        "fp8rl: the text holds a lone surrogate" in out
        and "/new begins another conversation" in out
    )
    type_lines(monkeypatch, "hello")
    assert main.main(loop) == 0
    assert out.startswith(capsys.readouterr().out.rstrip("\n"))


def test_a_model_without_tokenizer_does_not_talk(tmp_path, capsys):
    assert (
        main.main(["generate", "--interactive", "--model", str(make_model(tmp_path / "bare"))]) == 2
    )
    assert "--interactive: needs a tokenizer" in capsys.readouterr().err


# the terminal becomes the process's own, and Ctrl-C has its usual meaning even where the tests run
# in the background
START = """
import fcntl, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.default_int_handler)
from fp8rl_jax.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_in_a_terminal(model):
    """Through a pseudo-terminal: a prompt, an answer, Ctrl-C at the prompt, Ctrl-D."""
    master, slave = pty.openpty()
    command = [
        sys.executable,
        "-c",
        START,
        "generate",
        "--interactive",
        "--model",
        str(model),
        *FLAGS,
    ]
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
    )
    os.close(slave)
    seen = b""

    def expect(pattern, again=b""):
        nonlocal seen
        deadline = time.monotonic() + 120
        while not (found := re.search(pattern, seen)):
            assert time.monotonic() < deadline, seen
            if select.select([master], [], [], 1)[0]:
                seen += os.read(master, 4096)
            else:
                os.write(master, again)
        seen = seen[found.end() :]

    try:
        expect(rb"> ")
        os.write(master, b"hello\n")
        expect(rb"hello\r\n(?s:.+)\r\n> ")
        # a signal between the prompt and the read behind it is seen with the next one
        os.write(master, b"\x03")
        expect(rb"\r\n> ", again=b"\x03")
        os.write(master, b"\x04")
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)
