"""``rrd install-service``: make this installation of rrd a service of the machine, where no package does that.

It writes what a package would bring: the units with the path of this environment in them, the user, the directories,
completion. ``--remove`` takes away exactly that; configuration, jobs and adapters stay.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from rrd.cli.show import say
from rrd.durable import replace_file
from rrd.errors import BadConfig, Denied, RrdError

PACKAGED = "/usr/lib/rrd/venv/bin"
"""Where the units, as they are shipped, look for rrd."""
HIDDEN = ("/root", "/home", "/run/user")
"""What ProtectHome= hides from the service."""
CONFIG = "etc/rrd/rrd.toml"
OWN_UNIT = Path("/usr/lib/systemd/system/rrd.service")
COMMAND = "usr/local/bin/rrd"


@click.command("install-service")
@click.option("--root", default="/", metavar="DIR", type=click.Path(path_type=Path),
              help="Install below DIR, and start nothing: for images.")
@click.option("--remove", is_flag=True, help="Take away what was installed; configuration, jobs and adapters stay.")
@click.option("--dry-run", is_flag=True, help="Only say what would be written.")
def install_service(root: Path, remove: bool, dry_run: bool) -> None:
    """Make this installation a systemd service, where it did not come as a package.

    Writes the units, the user `rrd`, /etc/rrd, completion and man pages; then `systemctl enable --now rrd` starts it.
    Run it again after an upgrade. The environment must be one that the user rrd can reach: `python3 -m venv /opt/rrd`,
    or `pipx install --global`.
    """
    if root == Path("/") and not dry_run:
        _check_place()
    files = {root / name: text for name, text in wanted(Path(sys.prefix) / "bin").items()}
    command, target = root / COMMAND, Path(sys.prefix) / "bin" / "rrd"
    if dry_run:
        for path in (*files, command):
            click.echo(path)
        return
    if remove:
        _remove(root, files, command, target)
        return
    for path, text in files.items():
        if path != root / CONFIG or not path.exists():
            _write(path, text)
    if not os.path.lexists(command) and not _of_pipx():
        command.parent.mkdir(parents=True, exist_ok=True)
        command.symlink_to(target)
    if root == Path("/"):
        _settle()
    say(f"installed {len(files)} files below {root}; the service runs {target}")
    say("next: `systemctl enable --now rrd`, and `usermod -aG rrd NAME` for whoever hands in jobs")


def wanted(programs: Path) -> dict[str, str]:
    """What the machine needs, by path below its root; units with ``programs`` as the directory of the commands."""
    units = share("units")
    files: dict[str, str] = {}
    for unit in sorted(p for p in units.iterdir() if p.suffix in (".service", ".socket", ".target")):
        files[f"etc/systemd/system/{unit.name}"] = unit.read_text().replace(PACKAGED, str(programs))
    for kind in ("sysusers.d", "tmpfiles.d"):
        files |= {f"etc/{kind}/{p.name}": p.read_text() for p in sorted((units / kind).iterdir())}
    files[CONFIG] = (share("etc") / "rrd.toml").read_text()
    completions = share("completion")
    for name, place in COMPLETIONS.items():
        files[f"usr/local/share/{place}"] = (completions / name).read_text()
    from rrd.cli.manual import pages

    return files | {f"usr/local/share/man/{name}": text for name, text in pages().items()}


COMPLETIONS = {"rrd.bash": "bash-completion/completions/rrd", "_rrd": "zsh/site-functions/_rrd",
               "rrd.fish": "fish/vendor_completions.d/rrd.fish"}
"""Scripts of the shells, and where they look below a ``share`` directory."""


def share(what: str) -> Path:
    """A directory of what comes with rrd but is no Python: of the wheel's data, or of the checkout."""
    checkout = {"completion": "packaging/completion"}.get(what, what)
    for place in (Path(sys.prefix) / "share" / "rrd" / what, Path(__file__).parents[2] / checkout):
        if place.is_dir():
            return place
    raise RrdError(f"this installation of rrd came without its {what}", hint="install it from a wheel or a checkout")


def _check_place() -> None:
    """Whether the service could run from here, and nobody else installed it."""
    if os.geteuid() != 0:
        raise Denied("only root can install a service", hint="use sudo, with the full path of this rrd")
    if OWN_UNIT.exists():
        raise RrdError(f"a package has installed rrd as a service already: {OWN_UNIT}",
                       hint="remove the package first, or use what it installed")
    for path in (Path(sys.prefix), Path(os.path.realpath(sys.executable))):
        if why := _unreachable(path):
            raise BadConfig(f"the service could not run {path}: {why}",
                            hint="make the environment elsewhere: /usr/bin/python3 -m venv /opt/rrd")


def _unreachable(path: Path) -> str:
    """Why the user rrd cannot get at ``path``; empty where it can."""
    for hidden in HIDDEN:
        if path.is_relative_to(hidden):
            return f"services see nothing below {hidden}"
    closed = next((p for p in (path, *path.parents) if not p.stat().st_mode & 0o001), None)
    return f"{closed} is closed to other users" if closed else ""


def _of_pipx() -> bool:
    """Whether pipx made this environment: then the command is its to link and to take away."""
    return (Path(sys.prefix) / "pipx_metadata.json").exists()


def _write(path: Path, text: str) -> None:
    """Durably: after a power cut, systemd takes an empty unit for one that is masked."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text.encode())
    path.chmod(0o644)


def _settle() -> None:
    """Have systemd make the user and the directories, and read the units."""
    for command in (["systemd-sysusers", "/etc/sysusers.d/rrd.conf"],
                    ["systemd-tmpfiles", "--create", "/etc/tmpfiles.d/rrd.conf"], *_reload()):
        if shutil.which(command[0]) is None:
            raise RrdError(f"there is no {command[0]}: this machine does not run systemd",
                           hint="run `rrd daemon` under whatever supervises services here")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RrdError(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")


def _reload() -> Iterator[list[str]]:
    if os.path.isdir("/run/systemd/system"):
        yield ["systemctl", "daemon-reload"]


def _remove(root: Path, files: dict[Path, str], command: Path, target: Path) -> None:
    """The service is stopped first, which saves every job."""
    if root == Path("/") and os.path.isdir("/run/systemd/system"):
        units = [p.name for p in files if p.parent.name == "system"]
        subprocess.run(["systemctl", "disable", "--now", *units], capture_output=True, check=False)
    for path in files:
        if path != root / CONFIG:
            path.unlink(missing_ok=True)
    if command.is_symlink() and command.readlink() == target and not _of_pipx():
        command.unlink()
    if root == Path("/"):
        for reload in _reload():
            subprocess.run(reload, capture_output=True, check=False)
    say("removed; /etc/rrd, /var/lib/rrd and the user rrd stay")
