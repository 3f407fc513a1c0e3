"""Texts of the start-up files: systemd units, and a compose file."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fedapp.deploy.plan import Deployment, environment

_UNIT = """\
[Unit]
Description={description}
Wants=network-online.target
After={after}
# Never give up: a SuperLink refuses a key for up to 60 s after its SuperNode was killed, and may itself be away.
StartLimitIntervalSec=0

[Service]
User=fedapp
WorkingDirectory={own}
{variables}
ExecStart={command}
Restart=always
RestartSec=10
# From systemd 254 on the pause grows to a minute; an older one ignores these two and keeps to 10 s.
RestartSteps=5
RestartMaxDelaySec=60
# Keys and state are for this user alone, and only its own folder can be written to.
UMask=0077
NoNewPrivileges=yes
ProtectSystem=strict
ReadWritePaths={own}
PrivateTmp=yes

[Install]
WantedBy=multi-user.target
"""

_COMPOSE = """\
# Every machine starts its own services: docker compose up --detach SERVICE …
# FEDAPP_SOURCE is the app's source folder, by default the one above this file's.
x-build: &build
  context: ${FEDAPP_SOURCE:-..}
  # Only these are copied: no key gets into an image.
  dockerfile_inline: |
    FROM python:3.12-slim
    WORKDIR /app
    COPY pyproject.toml README.md LICENSE constraints.txt ./
    COPY fedapp fedapp
    COPY strategies strategies
    RUN pip install --no-cache-dir --constraint constraints.txt .

services:
"""


def unit_file(description: str, command: Sequence[str], home: str, own: str, after: str) -> str:
    """Return a systemd unit that runs a command in the machine's own folder `own` and restarts it for ever."""
    variables = {"PATH": f"{home}/.venv/bin:/usr/local/bin:/usr/bin:/bin", **environment(own)}
    return _UNIT.format(
        description=description,
        after=after,
        command=f"{home}/.venv/bin/" + " ".join(command).replace(" --", " \\\n  --"),
        own=own,
        variables="\n".join(f"Environment={name}={value}" for name, value in variables.items()),
    )


def compose_file(deployment: Deployment) -> str:
    """Return a compose file with the SuperLink, its SuperExec and every device's SuperNode as services.

    They use their machine's network, so that addresses are those of the certificate.
    """
    services = {
        "superlink": _service(deployment, "superlink", deployment.superlink_command()),
        "superexec": _service(deployment, "superlink", deployment.superexec_command()),
    }
    for device in deployment.devices:
        command = deployment.supernode_command(device)
        services[device.name] = _service(deployment, device.name, command)
        if path := str(device.node_config.get("data-path", "")):
            services[device.name]["volumes"].append({**_mount(path, path), "read_only": True})
    return _COMPOSE + "".join(_yaml(name, service) for name, service in services.items())


def _service(deployment: Deployment, name: str, command: Sequence[str]) -> dict[str, Any]:
    own = f"{deployment.home}/{name}"
    return {
        "image": "fedapp",
        "command": command,
        "working_dir": own,
        "environment": environment(own),
        "volumes": [_mount(f"./{name}", own)],
        "network_mode": "host",
        "restart": "always",  # the pause doubles from 0.1 s to 60 s
    }


def _mount(source: str, target: str) -> dict[str, Any]:
    return {"type": "bind", "source": source, "target": target}


def _yaml(name: str, service: Mapping[str, Any]) -> str:
    """Write a service as YAML, of which JSON is a part; compose reads $$ as $."""
    lines = [f"    {key}: {json.dumps(value)}\n".replace("$", "$$") for key, value in service.items()]
    return f"  {name}:\n    build: *build\n" + "".join(lines)
