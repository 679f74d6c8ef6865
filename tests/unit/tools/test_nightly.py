"""The line that tells when the nightly run last passed: it is written once all stages have passed on one commit."""

import datetime
import subprocess
from pathlib import Path

import pytest

from tools.nightly import LINE, git, last, main

MAKEFILE = """good fine:
\t@echo made $@ in night $$TEST_NIGHT
bad:
\t@false
edits:
\t@echo more >> Makefile
commits:
\t@git commit -q --allow-empty -m other
flaky:
\t@echo "with <$(AGAIN)>"; test -n "$(AGAIN)"
"""
NOW = datetime.datetime(2026, 11, 27, 12, tzinfo=datetime.UTC)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with a Makefile."""
    monkeypatch.setenv("TEST_NIGHT", "7")
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "a")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "a@b")
    (tmp_path / "tests").mkdir()
    (tmp_path / "Makefile").write_text(MAKEFILE)
    (tmp_path / ".gitignore").write_text(".nightly\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    return tmp_path


def commit(root: Path, subject: str) -> None:
    subprocess.run(["git", "add", "."], cwd=root, check=True)
    subprocess.run(["git", "commit", "-q", "--allow-empty", "-m", subject], cwd=root, check=True)


def test_a_whole_run_writes_the_line_and_its_commit_is_told(root: Path) -> None:
    assert last(root, NOW) == "nightly has never passed as a whole"
    main(["run", "good", "fine", "--all", "good", "fine"], root)
    head = git(root, "rev-parse", "HEAD")
    moment, at, seconds, *stages = (root / LINE).read_text().split()
    assert (at, stages) == (head, ["good", "fine"])
    assert int(seconds) < 60
    main(["run", "good", "fine", "--all", "good", "fine"], root)  # the line itself does not make the tree another one
    commit(root, "the line")
    assert last(root, datetime.datetime.fromisoformat(moment)) == (
        f"nightly last passed today, at {at[:7]}, in 0 min (1 commit since)"
    )


@pytest.mark.parametrize(
    ("stages", "whole", "said"),
    [
        (["good"], ["good", "fine"], "on this commit these stages have not passed: fine"),
        (["good", "edits"], ["good", "edits"], "the tree was not one commit"),
        (["good", "commits"], ["good", "commits"], "the tree was not one commit"),
    ],
)
def test_other_runs_write_nothing_and_say_why(
    stages: list[str], whole: list[str], said: str, root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    main(["run", *stages, "--all", *whole], root)
    assert not (root / LINE).exists()
    assert f"{LINE} is not written: {said}" in capfd.readouterr().out


def test_a_stage_that_failed_runs_again_with_what_failed(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """On that commit in that night only; then the line can be written."""
    with pytest.raises(SystemExit, match="FAILED: flaky"):
        main(["run", "flaky", "good", "--all", "flaky", "good"], root)
    main(["run", "flaky", "good", "--all", "flaky", "good"], root)
    assert (root / LINE).exists()
    said = capfd.readouterr().out
    assert said.index("with <>") < said.index("with <--last-failed>")
    commit(root, "other")
    with pytest.raises(SystemExit, match="FAILED: flaky"):
        main(["run", "flaky", "--all", "flaky"], root)


@pytest.mark.parametrize("name", ["Makefile", "new.py"])
def test_a_tree_with_changes_writes_nothing(name: str, root: Path) -> None:
    """Changed files, and files that git does not know."""
    (root / name).write_text(MAKEFILE + "\n")
    main(["run", "good", "--all", "good"], root)
    assert not (root / LINE).exists()


def test_every_stage_runs_and_those_that_failed_are_named(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^nightly: FAILED: bad missing$"):
        main(["run", "bad", "good", "missing", "fine", "--all", "bad", "good", "missing", "fine"], root)
    assert not (root / LINE).exists()
    assert "made good in night 7\n" in (said := capfd.readouterr().out)
    assert "made fine in night 7\n" in said


def test_a_run_goes_on_where_it_was_on_the_same_commit_in_the_same_night(
    root: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ["--all", "good", "fine"]
    main(["run", "good", *whole], root)
    monkeypatch.setenv("TEST_NIGHT", "8")
    main(["run", "fine", *whole], root)
    assert not (root / LINE).exists(), "nights have different parts of the tests"
    monkeypatch.setenv("TEST_NIGHT", "7")
    capfd.readouterr()
    main(["run", "good", "fine", *whole], root)
    said = capfd.readouterr().out
    assert "nightly: good has passed on this commit, in 0 s\n" in said
    assert "made fine in night 7\n" in said
    assert "made good" not in said
    assert (root / LINE).read_text().split()[1] == git(root, "rev-parse", "HEAD")


def test_another_commit_runs_all_stages_again(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    main(["run", "good", "--all", "good", "fine"], root)
    commit(root, "other")
    main(["run", "fine", "--all", "good", "fine"], root)
    assert not (root / LINE).exists()
    assert "these stages have not passed: good" in capfd.readouterr().out


def test_days_and_commits_are_counted_and_a_shallow_clone_says_that_it_cannot(root: Path) -> None:
    at = git(root, "rev-parse", "HEAD")
    assert at is not None
    (root / LINE).write_text(f"2026-11-24T23:00:00Z {at} 5040 good fine\n")
    for number in range(3):
        commit(root, str(number))
    assert last(root, NOW) == f"nightly last passed 3 days ago, at {at[:7]}, in 84 min (3 commits since)"
    shallow = root / "shallow"
    subprocess.run(["git", "clone", "-q", "--depth", "1", root.as_uri(), shallow], check=True)
    assert last(shallow, NOW) == f"nightly last passed 3 days ago, at {at[:7]}, in 84 min (commits since unknown)"
