"""Real proxies, as plain processes of whoever runs the tests, with their files below one folder."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedapp.deploy.local import LocalDeployment
from fedapp.deploy.proxy import NGINX_LOG
from tests.waiting import wait_until

# What Debian's nginx.conf has, 768 connections included.
NGINX = """\
{user}
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/error.log notice;
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
    """A proxy in front of a deployment's SuperLink; ``access_log`` is its log of requests to the Control API."""

    def __init__(self, command: list[str], deployment: LocalDeployment, folder: Path, site: Path) -> None:
        self.command, self.deployment, self.folder, self.site = command, deployment, folder, site
        self.log = folder / "log"
        self.access_log = folder / "access.log" if command[0].endswith("nginx") else self.log
        self.start()

    def start(self) -> None:
        environment = {
            "HOME": str(self.folder),
            # As systemd's LoadCredential.
            "CREDENTIALS_DIRECTORY": str(self.deployment.folder / "superlink"),
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, env=environment, stdout=log, stderr=log)

    def reload(self) -> None:
        """Let new requests follow the deployment's present files."""
        if self.command[0].endswith("nginx"):
            write_site(self.deployment, self.site)
            self.process.send_signal(signal.SIGHUP)
            wait_until(lambda: "gracefully shutting down" in (self.folder / "error.log").read_text())
            (self.folder / "error.log").write_text("")
            return
        self.process.terminate()
        self.process.wait(30)
        self.start()
        wait_for_port(self.deployment.deployment.port, self)


def write_site(deployment: LocalDeployment, site: Path) -> None:
    """Copy nginx's file, with a log below the test's folder."""
    text = (deployment.folder / "proxy" / "nginx.conf").read_text()
    assert NGINX_LOG in text
    site.write_text(text.replace(NGINX_LOG, str(site.with_name("access.log"))))


@contextmanager
def nginx(deployment: LocalDeployment) -> Iterator[Proxy]:
    """Run nginx on the deployment's site."""
    program = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
    if program is None:
        pytest.skip("needs nginx: apt-get install nginx-light")
    folder, site = deployment.folder / "nginx", deployment.folder / "nginx" / "site.conf"
    folder.mkdir(exist_ok=True)
    write_site(deployment, site)
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
    proxy = Proxy(command, deployment, folder, site)
    try:
        wait_for_port(deployment.deployment.port, proxy)
        yield proxy
    finally:
        proxy.process.terminate()
        proxy.process.wait(30)


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
