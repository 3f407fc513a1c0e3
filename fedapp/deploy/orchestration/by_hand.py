"""Text of ``start.sh``: the same processes as the units', kept running by a shell where there is no systemd."""

import shlex

from fedapp.deploy.plan import SUPEREXEC, Deployment, Service

FILE = "start.sh"
PAUSE = 10  # seconds before a process that ended is started again, as in the units

_SCRIPT = """\
#!/bin/sh
# Start the processes of {machine} where there is no systemd, each again {pause} s after its end; run it as root.
# SIGTERM or Ctrl-C ends them all. Unlike the units, it limits neither their memory nor the network of runs' code.
# FEDAPP_ONE_USER=1 runs all as the caller: then the code of runs can read the keys.
# Root runs a copy that is root's: users of {machine}'s processes can write to the folder that this file came in.
set -u
ulimit -c 0
ulimit -n "$(ulimit -H -n)"
PATH={home}/.venv/bin:$PATH
export PATH

if [ "${{FEDAPP_ONE_USER:-}}" != 1 ]; then
    for user in {users}; do
        if ! id "$user" >/dev/null 2>&1; then
            echo "error: there is no user $user: make it (docs/deploy.md, 1), or set FEDAPP_ONE_USER=1" >&2
            exit 1
        fi
    done
    if [ "$(id -u)" != 0 ]; then
        echo "error: only root starts processes of other users: run this as root, or set FEDAPP_ONE_USER=1" >&2
        exit 1
    fi
fi

# keep NAME USER GROUPS FOLDER COMMAND…: run the command in its folder as its user, and again when it ended.
keep() {{
    name=$1 user=$2 groups=$3
    cd "$4" || exit 1
    shift 4
    # The user opens the log, not root: the folder is the user's, who could have put a link there.
    set -- sh -c 'exec "$@" >>"$0" 2>&1' "$name.log" "$@"
    if [ "${{FEDAPP_ONE_USER:-}}" != 1 ]; then
        set -- setpriv --reuid "$user" --regid "$user" --groups "$groups" "$@"
    fi
    child=
    trap '[ -z "$child" ] || {{ kill -TERM "-$child" "$child" 2>/dev/null; wait "$child"; }}; exit 0' TERM
    while :; do
        setsid "$@" &  # its children are a group with it, and end with it
        child=$!
        wait "$child"
        echo "$name ended with $?, and starts again in {pause} s" >&2
        kill -TERM "-$child" 2>/dev/null
        sleep {pause} &
        child=$!
        wait "$child"
    done
}}

trap 'trap - INT TERM; kill $kept 2>/dev/null; wait; exit 0' INT TERM
kept=
{services}wait
"""


def start_script(deployment: Deployment, machine: str) -> str:
    """Return the script of a machine: ``superlink``, or a device's name."""
    services = [service for service in deployment.services if service.machine == machine]
    return _SCRIPT.format(
        machine="the server" if machine == "superlink" else machine,
        pause=PAUSE,
        home=deployment.home,
        users=" ".join(dict.fromkeys(service.user for service in services)),
        services="".join(_kept(deployment, service) for service in services),
    )


def _kept(deployment: Deployment, service: Service) -> str:
    own = f"{deployment.home}/{service.folder}"
    variables = {"HOME": own, **service.environment(deployment.home)}
    settings = " \\\n    ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    command = shlex.join(service.command).replace(" --", " \\\n    --")
    groups, umask = service.user, "077"
    if service.is_server:  # the SuperLink reads runs' folders
        groups, umask = (groups, "027") if service.runs_apps else (f"{groups},fedapp-{SUPEREXEC}", umask)
    return f"""
umask {umask}
keep {service.name} {service.user} {groups} {own} env \\
    {settings} \\
    {command} &
kept="$kept $!"
"""
