"""The commands of a conversation: /help and the others."""

import json
from pathlib import Path

import pytest

from jswa.commands.chat.conversation import Conversation, Figures
from jswa.commands.chat.slash import COMMANDS, NAMES, is_command, obey


def talked() -> Conversation:
    """A conversation of one turn."""
    conversation = Conversation("Be kind.")
    conversation.messages += [{"role": "user", "content": "Hé"}, {"role": "assistant", "content": "Yes."}]
    conversation.figures.append(Figures(10, 4, 5, 0.5, 2.5))
    return conversation


@pytest.mark.parametrize(
    ("line", "is_one"),
    [
        ("/help", True), ("/Help ", True), ("/save a b.json", True), ("/system Be\nkind.", True), ("/hlep", True),
        ("/etc/hosts", False), ("/ help", False), (" /help", False), ("/", False), ("// a", False), ("1/2", False),
    ],
)  # fmt: skip
def test_a_command_is_a_slash_and_a_word(line: str, is_one: bool) -> None:
    assert is_command(line) == is_one


def test_help_has_every_command_and_every_command_is_known() -> None:
    shown = obey("/help", talked(), "m").text
    assert all(command in shown and text in shown for command, text in COMMANDS.items())
    assert max(map(len, shown.splitlines())) <= 80
    for name in NAMES:
        assert not obey(name, talked(), "m").text.startswith(f"{name} is no command")


def test_an_unknown_command_names_a_near_one() -> None:
    assert obey("/hlep", talked(), "m").text == "/hlep is no command. Did you mean /help?"
    assert obey("/zzz", talked(), "m").text == "/zzz is no command. /help lists the commands."
    assert obey("/quit", talked(), "m").then == "leave"


def test_a_system_message_begins_a_new_conversation() -> None:
    conversation = talked()
    assert obey("/system", conversation, "m").text == "system message: Be kind."
    assert len(conversation.messages) == 2
    obey("/system Be brief.\nVery.", conversation, "m")
    assert conversation.prompt() == [{"role": "system", "content": "Be brief.\nVery."}]
    obey('/system ""', conversation, "m")
    assert conversation.prompt() == []


def test_an_image_goes_with_the_next_message_only(tmp_path: Path) -> None:
    conversation, file = talked(), tmp_path / "cat.png"
    assert obey(f"/image {file}", conversation, "m").text == f"{file} cannot be read: No such file or directory."
    assert obey("/image notes.txt", conversation, "m").text == "notes.txt is no image, as far as its name tells."
    file.write_bytes(b"\x89PNG")
    assert obey(f"/image {file}", conversation, "m").text == "The next message has cat.png."
    conversation.say("What is this?")
    conversation.say("And now?")
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw=="}}
    said = {"role": "user", "content": [image, {"type": "text", "text": "What is this?"}]}
    assert conversation.messages[-2:] == [said, {"role": "user", "content": "And now?"}]


def test_clear_keeps_the_system_message() -> None:
    conversation = talked()
    obey("/clear", conversation, "m")
    assert conversation.prompt() == [{"role": "system", "content": "Be kind."}]
    assert conversation.report() == "No answer yet."


def test_a_conversation_is_saved_in_openais_form_and_replaces_no_file(tmp_path: Path) -> None:
    path, conversation = tmp_path / "a chat.json", talked()
    assert obey(f"/save {path}", conversation, "m").text == f"3 messages are in {path}."
    assert json.loads(path.read_text(encoding="utf-8")) == {"model": "m", "messages": conversation.prompt()}
    assert "Hé" in path.read_text(encoding="utf-8")
    assert "exists already" in obey(f"/save {path}", conversation, "m").text
    assert "cannot be written" in obey(f"/save {tmp_path}/none/x", conversation, "m").text
    assert "needs the name of a file" in obey("/save", conversation, "m").text


def test_stats_are_those_of_the_last_answer_and_of_all() -> None:
    conversation = talked()
    conversation.figures.append(Figures(20, 16, 3, 0.25, 0.75))
    assert obey("/stats", conversation, "m").text.splitlines() == [
        "last answer:  20 tokens in, 16 cached; first token after 250 ms, all in 0.75 s; 3 tokens out, 4 tokens/s",
        "conversation: 2 messages; 2 answers; 30 tokens in, 20 cached; 8 tokens out; 3.25 s",
    ]
