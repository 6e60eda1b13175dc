"""Dockerfiles without Docker: files, working directory and variables, and a line for what needs an image."""

from __future__ import annotations

import pytest

from rlmux.core.errors import UserError
from rlmux.rl.sandboxes.harbor_suite import prepare


@pytest.fixture
def after(make, task):
    """A folder sandbox after a Dockerfile, with these files beside it."""

    def after(text, *names):
        environment = task.folder / "environment"
        (environment / "Dockerfile").write_text(text)
        for name in names:
            (environment / name).parent.mkdir(parents=True, exist_ok=True)
            (environment / name).write_text(name)
        sandbox = make("folder")
        prepare(task, sandbox)
        return sandbox

    return after


def files(sandbox, inside):
    folder = sandbox.path(inside)
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("copy", "names", "found"),
    [
        ("COPY a.txt ./", ["a.txt"], ["a.txt"]),
        ("COPY a.txt b.txt", ["a.txt"], ["b.txt"]),
        ("COPY a.txt b.txt in/", ["a.txt", "b.txt"], ["in/a.txt", "in/b.txt"]),
        ("COPY data data", ["data/a", "data/in/b"], ["data/a", "data/in/b"]),
        ("COPY data .", ["data/a", "data/in/b"], ["a", "in/b"]),
        ("COPY . .", ["data/a"], ["Dockerfile", "data/a"]),
        ('COPY ["with space", "/app/"]', ["with space"], ["with space"]),
        ("COPY a.txt \\\n  # a comment\n  /app/x/y", ["a.txt"], ["x/y"]),
    ],
)
def test_files_are_copied_as_docker_does(copy, names, found, after):
    assert files(after(f"FROM ubuntu:24.04\nWORKDIR /app\n{copy}\n", *names), "/app") == found


def test_the_working_directory_may_be_relative_to_the_last(after):
    sandbox = after("FROM x\nWORKDIR /app\nWORKDIR inner\nCOPY a .\n", "a")
    assert sandbox.workdir == "/app/inner"
    assert files(sandbox, "/app") == ["inner/a"]


def test_variables_have_both_forms(after):
    sandbox = after("FROM x\nENV A=1 B='two words'\nENV C three words\n")
    assert sandbox.environment == {"A": "1", "B": "two words", "C": "three words"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("RUN apt-get update", "RUN needs an image; accepted here: FROM, WORKDIR, COPY, ENV; or sandbox: docker"),
        ("add https://x.org/a /a", "ADD needs an image"),
        ("COPY --from=build a b", "COPY --from=build; accepted: COPY FROM... TO"),
        ("COPY none .", "COPY none: not in .*; accepted: a file or folder of it"),
        ("COPY ../tests .", "COPY ../tests: not in"),
        ("COPY a", "COPY a; accepted"),
        ("ENV A='b", "No closing quotation"),
        ("ENV A=1 B", "'B'; accepted: NAME=VALUE"),
        ("WORKDIR", "accepted: at least one word"),
    ],
)
def test_what_needs_an_image_is_refused_with_file_and_line(line, said, after):
    with pytest.raises(UserError, match=f"environment/Dockerfile line 4: .*{said}"):
        after(f"FROM x\n\n# a comment\n{line}\n")
