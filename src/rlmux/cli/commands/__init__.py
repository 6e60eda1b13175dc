"""Every command: its words, the function of another room that does the work, and the display of what came out.

training      run, compare, resume, chaos                      prediction    simulate, plan, whatif, reproduce
runs          report, submit, cancel, stop, why, hold, release, rank, park, unpark, notice, usage, status, logs, verify
lookups       queue, samples, alerts, export
machine       doctor, profile, version
sharing       broker, serve, budget

Imports are made when a command runs, so that `--help`, `simulate` and `plan` stay light.

Reading order: training, prediction, runs, lookups, serving, sharing, people, machine, options.
"""

from __future__ import annotations

import typer

from rlmux.cli.commands import lookups, machine, people, prediction, runs, serving, sharing, training

app = typer.Typer(
    name="rlmux",
    help="Run many LLM RL post-training pipelines together on the GPUs you have.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


@app.callback(invoke_without_command=True)
def _no_command(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


_NEGATIVE = {"ignore_unknown_options": True}
"""Words such as -5 are arguments."""

for _command in (
    training.run,
    training.compare,
    serving.serve,
    prediction.simulate,
    prediction.plan,
    prediction.whatif,
    runs.report,
    training.resume,
    sharing.broker,
    sharing.token,
    people.user,
    people.project,
    people.audit,
    serving.budget,
    runs.submit,
    runs.cancel,
    runs.stop,
    runs.why,
    runs.hold,
    runs.release,
    runs.rank,
    runs.park,
    runs.unpark,
    runs.notice,
    runs.usage,
    lookups.queue,
    runs.status,
    runs.logs,
    lookups.samples,
    lookups.alerts,
    lookups.export,
    runs.verify,
    training.chaos,
    machine.doctor,
    machine.profile,
    prediction.reproduce,
    machine.version,
):  # in the order of `rlmux --help`
    app.command(context_settings=_NEGATIVE if _command is runs.rank else None)(_command)
