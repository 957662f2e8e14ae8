"""Commands on this machine and its processes: doctor, config and launch."""

from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.options import Quiet
from trimtab.cli.output import ask, echo, set_verbosity, show_launch, show_table


def doctor() -> None:
    """Report hardware, installed packages and what is missing."""
    from trimtab.hardware.doctor import collect_findings

    show_table(("", "found", "cure"), [(f.topic, f.found, f.cure) for f in collect_findings()])


def config(
    to: Annotated[Path, typer.Option(help="File to write; launch reads launch.yaml by default.")] = Path("launch.yaml"),
    default: Annotated[bool, typer.Option("--default", help="Do not ask questions; detect every setting.")] = False,
) -> None:
    """Write a launch file: number of processes, hosts and ports."""
    from trimtab.distributed.launch.launch_file import QUESTIONS, write_launch_file

    echo(write_launch_file(to, [] if default else QUESTIONS, ask))


def launch(
    target: Annotated[str, typer.Argument(help="Script, recipe (YAML), or, with -m, module to run.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments passed to the script.")] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="Run TARGET as a module, as python -m does.")] = False,
    config_file: Annotated[Path | None, typer.Option("--config", help="Launch file. Default: launch.yaml.")] = None,
    processes: Annotated[int | None, typer.Option(help="Processes per host. Default: one per GPU.")] = None,
    hosts: Annotated[str | None, typer.Option(help="Host names: a,b,c. Run the same command on each of them.")] = None,
    num_hosts: Annotated[int | None, typer.Option(help="Number of hosts, instead of --hosts.")] = None,
    host_index: Annotated[int | None, typer.Option(help="Index of this host, from 0.")] = None,
    address: Annotated[str | None, typer.Option(help="Address of host 0.")] = None,
    port: Annotated[int | None, typer.Option(help="Rendezvous port on host 0. Default: a free one.")] = None,
    max_restarts: Annotated[
        int | None, typer.Option(help="Maximum number of restarts of all processes after a failure.")
    ] = None,
    log_dir: Annotated[str | None, typer.Option(help="Folder for logs of ranks above 0. Default: runs/logs.")] = None,
    cpu: Annotated[bool | None, typer.Option("--cpu", help="Train on the CPU even if there are GPUs.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only check, and print the torchrun command.")] = False,
    quiet: Quiet = False,
) -> None:
    """Run a script or recipe in several processes, on one host or more."""
    from trimtab.distributed.launch.command import plan_launch
    from trimtab.distributed.launch.launch_file import read_launch_file, split_hosts
    from trimtab.distributed.launch.run import start

    given = {
        "processes": processes,
        "hosts": None if hosts is None else split_hosts(hosts),
        "num_hosts": num_hosts,
        "host_index": host_index,
        "address": address,
        "port": port,
        "max_restarts": max_restarts,
        "log_dir": log_dir,
        "cpu": cpu,
    }
    set_verbosity(quiet, False)
    file = read_launch_file(config_file)
    plan = plan_launch(target, arguments or [], module=module, file=file, given=given)
    if dry_run or not quiet:
        show_launch(plan, to_stderr=not dry_run)
    if dry_run:
        return
    ending = start(plan)
    if ending.message and not (quiet and ending.code == 75):
        echo(ending.message, err=True)
    raise typer.Exit(ending.code)
