"""Real proxies, as plain processes of whoever runs the tests, with their files below one folder."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedapp.deploy.local import LocalDeployment

# What Debian's nginx.conf has, 768 connections included.
NGINX = """\
{user}
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/error.log warn;
events {{ worker_connections 768; }}
http {{
    access_log {folder}/access.log;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {site};
}}
"""


class Proxy:
    """A proxy in front of a deployment's SuperLink."""

    def __init__(self, process: subprocess.Popen[bytes], site: Path, log: Path) -> None:
        self.process, self.site, self.log = process, site, log


@contextmanager
def nginx(deployment: LocalDeployment) -> Iterator[Proxy]:
    """Run nginx on the deployment's site."""
    program = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
    if program is None:
        pytest.skip("needs nginx: apt-get install nginx-light")
    folder, site = deployment.folder / "nginx", deployment.folder / "proxy" / "nginx.conf"
    folder.mkdir(exist_ok=True)
    user = "" if os.getuid() else "user root;"  # or its workers couldn't write below the test's folder
    (folder / "nginx.conf").write_text(NGINX.format(folder=folder, site=site, user=user))
    command = [program, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]
    with _running(command, deployment, folder, site) as proxy:
        yield proxy


@contextmanager
def caddy(deployment: LocalDeployment) -> Iterator[Proxy]:
    """Run Caddy on the deployment's Caddyfile."""
    program = shutil.which("caddy")
    if program is None:
        pytest.skip("needs Caddy: apt-get install caddy")
    folder, site = deployment.folder / "caddy", deployment.folder / "proxy" / "Caddyfile"
    folder.mkdir(exist_ok=True)
    command = [program, "run", "--config", str(site), "--adapter", "caddyfile"]
    with _running(command, deployment, folder, site) as proxy:
        yield proxy


@contextmanager
def _running(command: list[str], deployment: LocalDeployment, folder: Path, site: Path) -> Iterator[Proxy]:
    environment = {
        "HOME": str(folder),
        "CREDENTIALS_DIRECTORY": str(deployment.folder / "superlink"),  # as systemd's LoadCredential
    }
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    proxy = Proxy(process, site, folder / "log")
    try:
        wait_for_port(deployment.deployment.port, proxy)
        yield proxy
    finally:
        process.terminate()
        process.wait(30)


def wait_for_port(port: int, proxy: Proxy) -> None:
    """Wait until a proxy listens."""
    deadline = time.monotonic() + 60
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert proxy.process.poll() is None, proxy.log.read_text()
        assert time.monotonic() < deadline, proxy.log.read_text()
        time.sleep(0.05)


PROXIES = {"nginx": nginx, "caddy": caddy}
