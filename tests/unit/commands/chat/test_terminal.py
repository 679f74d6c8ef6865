"""`jswa chat` on a real terminal: keys, history, Ctrl-C and commands, with a server whose model is a script."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands.terminal import Terminal
from tests.support.server.fake_engine import FakeEngine
from tests.support.server.harness import Client, serving

TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
WORDS = b"word " * 40
END = 2
PROMPT, PLAIN = "\x1b[?2004h", "> "  # prompt_toolkit begins a prompt with bracketed paste
ENTER, ALT_ENTER, UP, CTRL_C, CTRL_D = "\r", "\x1b\r", "\x1b[A", "\x03", "\x04"


def script(prompt: list[int], position: int) -> int:
    """A message that ends in "more" has words for ever, and any other "ok" for each message of the conversation."""
    text = bytes(token - 3 for token in prompt).rstrip()
    words = WORDS if text.endswith(b"more") else b"ok " * len(text.split(b"\n"))
    if words is not WORDS and position == len(words):
        return END
    return 3 + words[position % len(words)]


@pytest.fixture
def server() -> Iterator[Client]:
    """A server that takes a moment for each token, so that an answer without an end fills no memory."""
    engine = FakeEngine(rule=script, max_model_len=1 << 20)
    engine.delay = 0.002
    with serving(engine, template=TEMPLATE) as client:
        yield client


def chat(server: Client, home: Path, *more: str) -> Terminal:
    """Open a chat on a terminal of 60 columns; its history is in `home`."""
    terminal = Terminal("chat", "--url", server.url, *more, environ={"XDG_STATE_HOME": str(home)})
    terminal.wait_for("/help shows commands and keys", PROMPT)
    return terminal


def test_ctrl_c_ends_the_answer_in_the_engine_and_the_conversation_goes_on(server: Client, tmp_path: Path) -> None:
    """Words are not broken at the end of a line, and the part that was said stays in the prompt."""
    with chat(server, tmp_path) as terminal:
        terminal.type("tell more" + ENTER)
        shown = terminal.wait_for("\r\nword", "\r\nword")
        assert set(shown.rpartition("\x1b[?2004l")[2].split()) == {"word"}
        terminal.type(CTRL_C)
        terminal.wait_for("[stopped]", PROMPT)
        terminal.type("and now" + ENTER)
        terminal.wait_for("ok ok ok", PROMPT)
        first, second = server.engine.seen
        assert not server.engine.running
        assert len(second.prompt) > len(first.prompt) + 60
        terminal.type("/regenerate" + ENTER)
        terminal.wait_for("ok ok ok", PROMPT)
        assert server.engine.seen[2].prompt.tolist() == second.prompt.tolist()
        terminal.type("/stats" + ENTER)
        terminal.wait_for("last answer:", "3 answers, 1 of them stopped", PROMPT)
        terminal.type(CTRL_C)
        terminal.wait_for("Ctrl-C again", PROMPT)
        terminal.type(CTRL_C)
        assert terminal.status() == 0


def test_lines_are_edited_and_kept_for_the_next_chat(server: Client, tmp_path: Path) -> None:
    """Only the user may read them. Alt-Enter and a backslash at the end begin another line of a message."""
    with chat(server, tmp_path) as terminal:
        terminal.type("one\\" + ENTER + "two" + ALT_ENTER + "tree\x1b[Dh\x7f\x1b[D\x1b[Dh" + ENTER)
        terminal.wait_for("ok ok ok", PROMPT)
        terminal.type("/exit" + ENTER)
        assert terminal.status() == 0
    assert stat.S_IMODE((tmp_path / "jswa" / "chat_history").stat().st_mode) == 0o600
    with chat(server, tmp_path) as terminal:
        terminal.type(UP + UP + UP + UP + ENTER)
        terminal.wait_for("ok ok ok", PROMPT)
        terminal.type(CTRL_D)
        assert terminal.status() == 0
    first, again = [bytes(token - 3 for token in request.prompt) for request in server.engine.seen]
    assert first == again == b"one\ntwo\nthree\n"


def test_commands_complete_and_an_unknown_one_is_no_message(server: Client, tmp_path: Path) -> None:
    with chat(server, tmp_path, "--system", "Be kind.") as terminal:
        terminal.type("/sys\t" + ENTER)
        terminal.wait_for("system message: Be kind.", PROMPT)
        terminal.type("/regenrate" + ENTER)
        terminal.wait_for("/regenrate is no command. Did you mean /regenerate?", PROMPT)
        terminal.type(f"/save {tmp_path}/x.json" + ENTER)
        terminal.wait_for("1 messages are in", PROMPT)
    assert not server.engine.seen


@pytest.mark.parametrize("keys", ["hello\\\rthere\r", "hello" + ENTER])
def test_without_prompt_toolkit_lines_are_read_plainly(server: Client, tmp_path: Path, keys: str) -> None:
    """The chat says once what is missing, and all else is there."""
    home = {"XDG_STATE_HOME": str(tmp_path)}
    with Terminal("chat", "--url", server.url, environ=home, columns=100, without="prompt_toolkit") as terminal:
        terminal.wait_for('pip install "prompt-toolkit>=3.0" gives both.', PLAIN)
        terminal.type(keys)
        terminal.wait_for("ok", PLAIN)
        terminal.type("more" + ENTER)
        terminal.wait_for("word")
        terminal.type(CTRL_C)
        terminal.wait_for("[stopped]", PLAIN)
        terminal.type(CTRL_D)
        assert terminal.status() == 0
    assert len(server.engine.seen[0].prompt) == len(keys.replace("\\\r", " "))


@pytest.mark.parametrize("terminal_of", ["stdin", "stdout"])
def test_with_a_pipe_there_are_no_control_codes(server: Client, terminal_of: str) -> None:
    """The lines of stdin are messages, commands too, and prompt_toolkit is not imported."""
    code = "import sys; from jswa.commands.cli import run; status = run(sys.argv[1:])"
    code = f"{code}; assert 'prompt_toolkit' not in sys.modules; sys.exit(status)"
    ours, other = os.openpty()
    stdin, stdout = [other if name == terminal_of else subprocess.PIPE for name in ("stdin", "stdout")]
    command = [sys.executable, "-c", code, "chat", "--url", server.url]
    process = subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=subprocess.PIPE, text=True)
    os.close(other)
    if terminal_of == "stdin":
        os.write(ours, b"hi\n\n/help\n\x04")
        shown, error = process.communicate()
    else:
        _, error = process.communicate("hi\n\n/help\n")
        shown = os.read(ours, 65_536).decode().replace("\r\n", "\n")
    os.close(ours)
    assert (process.returncode, error) == (0, "")
    prompt = "> " if terminal_of == "stdin" else ""
    assert shown == f"{prompt}ok \n\n{prompt}{prompt}ok ok ok \n\n{prompt}"
