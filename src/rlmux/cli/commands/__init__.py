"""Every command: its options, the function of another room that does the work, and the display of the result.

Imports are made when a command runs, so that `--help`, `simulate` and `plan` stay light.

Reading order: files, demo, training, prediction, runs, backups, lookups, serving, sharing, people, machine, options.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rlmux.cli.commands import (
    backups,
    demo,
    files,
    lookups,
    machine,
    people,
    prediction,
    runs,
    serving,
    sharing,
    training,
)


class _GroupedHelp(TyperGroup):
    """Lists the commands under the names of their groups, each with its first sentence in full and an example."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Typer groups commands by `rich_help_panel` only in a rich markup mode, which draws boxes."""
        width = max(map(len, self.commands))
        for group, commands in _COMMANDS_BY_GROUP.items():
            with formatter.section(group):
                for command in commands:
                    name = command.__name__
                    formatter.write_dl([(name.ljust(width), self.commands[name].get_short_help_str(200))])
                    formatter.write(f"{'':{formatter.current_indent + width + 2}}$ {example_of(command)}\n")


def example_of(command: Callable[..., Any]) -> str:
    """The first example of a command's docstring, unwrapped, to be copied."""
    return (command.__doc__ or "").partition("Example: ")[2].partition("\n")[0]


app = typer.Typer(
    name="rlmux",
    cls=_GroupedHelp,
    help="Run many LLM RL post-training pipelines together on the GPUs you have.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        machine.version()
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _no_command(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


_COMMANDS_BY_GROUP: dict[str, tuple[Callable[..., Any], ...]] = {
    "Train": (
        demo.demo,
        files.init,
        files.check,
        files.schema,
        training.run,
        training.compare,
        training.resume,
        runs.submit,
        runs.verify,
        training.chaos,
    ),
    "Watch and steer": (
        runs.status,
        lookups.queue,
        runs.why,
        runs.logs,
        lookups.samples,
        lookups.alerts,
        runs.usage,
        runs.report,
        lookups.export,
        runs.stop,
        runs.cancel,
        runs.retry,
        runs.remove,
        backups.backup,
        backups.restore,
        runs.hold,
        runs.release,
        runs.rank,
        runs.park,
        runs.unpark,
        runs.notice,
    ),
    "Predict": (
        prediction.simulate,
        prediction.plan,
        prediction.estimate,
        prediction.whatif,
        prediction.reproduce,
    ),
    "Serve and share": (
        serving.serve,
        serving.drain,
        sharing.broker,
        sharing.token,
        people.user,
        people.project,
        people.audit,
        serving.budget,
    ),
    "Machine": (machine.doctor, machine.profile, machine.version),
}
"""In the order of `rlmux --help`."""
_NEGATIVE = {"ignore_unknown_options": True}
"""Words such as -5 are arguments."""

for _command in (each for group in _COMMANDS_BY_GROUP.values() for each in group):
    app.command(context_settings=_NEGATIVE if _command is runs.rank else None)(_command)
