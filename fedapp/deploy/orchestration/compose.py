"""Text of the compose file: the same processes as the units', in containers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedapp.deploy.plan import Deployment, Service

# Who owns a machine's folder, and the part of it where the code of runs may write.
FLOWER_USER, APPS_USER = 10001, 10002
PROXY_FILES = ("ca.crt", "server.crt", "server.key")  # of the server's folder, read by nginx

_COMPOSE = """\
# Every machine starts its own services: docker compose up --detach SERVICE …
# FEDAPP_SOURCE is the app's source folder, with its Dockerfile, by default the folder above this file's;
# FEDAPP_MEMORY is a service's limit.
x-build: &build
  context: ${FEDAPP_SOURCE:-..}

# Their machine's network, so that addresses are those of the certificate.
x-service: &service
  network_mode: host
  restart: always  # the pause doubles from 0.1 s to 60 s
  read_only: true
  tmpfs: [/tmp]
  cap_drop: [ALL]
  security_opt: ["no-new-privileges:true"]
  mem_limit: ${FEDAPP_MEMORY:-8g}
  pids_limit: 4096
  ulimits: {nofile: 65536, core: 0}

services:
"""


def compose_file(deployment: Deployment) -> str:
    """Return a compose file with every process as a service, and nginx in front of the SuperLink."""
    services = {service.name: _service(deployment, service) for service in deployment.services}
    if deployment.backend:
        services["proxy"] = _proxy(deployment)
    return _COMPOSE + "".join(_yaml(name, service) for name, service in services.items())


def _service(deployment: Deployment, service: Service) -> dict[str, Any]:
    own = f"{deployment.home}/{service.folder}"
    volumes = [_mount(f"./{service.folder}", own)]
    if service.runs_apps and not service.is_worker:  # nothing else of the machine's folder can be seen
        certificate = f"{service.machine}/{'ca.crt' if service.is_server else 'local.crt'}"
        volumes.append(_mount(f"./{certificate}", f"{deployment.home}/{certificate}", read_only=True))
    if service.socket:
        region = str(Path(service.socket).parent)
        volumes.append(_mount(region, region))
    if service.runs_apps and service.data:
        volumes.append(_mount(service.data, service.data, read_only=True))
    return {
        "image": "fedapp",
        "command": service.command,
        "working_dir": own,
        "user": _user(APPS_USER if service.runs_apps else FLOWER_USER),
        "environment": {"HOME": own, **service.environment(deployment.home)},
        "volumes": volumes,
    }


def _proxy(deployment: Deployment) -> dict[str, Any]:
    own = f"{deployment.home}/superlink"
    files = {f"./superlink/{name}": f"{own}/{name}" for name in PROXY_FILES}
    files["./proxy/nginx.conf"] = "/etc/nginx/conf.d/default.conf"
    return {
        "image": "nginx:stable",
        "user": _user(FLOWER_USER),  # who owns the key
        "volumes": [_mount(source, target, read_only=True) for source, target in files.items()],
        "tmpfs": ["/tmp", "/run", "/var/cache/nginx"],
    }


def _user(number: int) -> str:
    return f"{number}:{number}"


def _mount(source: str, target: str, *, read_only: bool = False) -> dict[str, Any]:
    mount = {"type": "bind", "source": source, "target": target}
    return {**mount, "read_only": True} if read_only else mount


def _yaml(name: str, service: Mapping[str, Any]) -> str:
    """Write a service as YAML, of which JSON is a part; compose reads $$ as $."""
    build = "    build: *build\n" if service["image"] == "fedapp" else ""
    lines = [f"    {key}: {json.dumps(value)}\n".replace("$", "$$") for key, value in service.items()]
    return f"  {name}:\n    <<: *service\n{build}" + "".join(lines)
