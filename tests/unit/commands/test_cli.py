"""How a command ends that the user interrupts, or whose output nobody reads."""

import signal
import subprocess
import sys

import pytest

from jswa.commands import cli


@pytest.mark.parametrize(("end", "status"), [(KeyboardInterrupt, 130), (BrokenPipeError, 141)])
def test_ctrl_c_and_a_closed_pipe_end_a_command_without_a_traceback(
    end: type[BaseException], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the exit status that a shell expects of each."""

    def ended() -> int:
        raise end

    monkeypatch.setattr("jswa.commands.doctor.report", ended)
    assert cli.run(["doctor"]) == status
    assert capsys.readouterr() == ("", "")


ENDS_SLOWLY = """
import sys, time
from jswa.commands import cli
from jswa.exec.compile import ending

def wait(seconds):
    print("ends", flush=True)
    time.sleep(60)

ending.end_compiling, sys.argv = wait, ["jswa", "--version"]
cli.main()
"""


def test_a_second_ctrl_c_ends_a_command_that_ends_already() -> None:
    """While it waits for programs that are compiled; without a traceback."""
    with subprocess.Popen([sys.executable, "-c", ENDS_SLOWLY], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as ends:
        assert ends.stdout is not None
        assert [ends.stdout.readline() for _ in range(2)][1] == b"ends\n"
        ends.send_signal(signal.SIGINT)
        assert ends.communicate(timeout=30) == (b"", b"")
        assert ends.returncode == -signal.SIGINT
