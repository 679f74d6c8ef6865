"""How a command ends that the user interrupts."""

import pytest

from jswa.commands import cli


def test_ctrl_c_ends_a_command_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the exit status that a shell expects of it."""

    def interrupted() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("jswa.commands.doctor.report", interrupted)
    assert cli.run(["doctor"]) == 130
    assert capsys.readouterr() == ("", "")
