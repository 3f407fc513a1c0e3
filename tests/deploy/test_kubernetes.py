"""The Kustomize folders: against the API's schemas, by Kustomize itself, and their probes on real processes.

No cluster runs these Pods here. What a schema can't say and an API server checks is checked by hand.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path, PurePosixPath

import kubernetes_validate
import pytest
import yaml

from fedapp.deploy.files import read_deployment, startup_files
from fedapp.deploy.local import BIN, LocalDeployment
from fedapp.deploy.orchestration.compose import APPS_USER, FLOWER_USER
from tests.deploy.command import contents, deploy
from tests.docs.pages import blocks_of

VERSIONS = ("1.30", "1.37")  # of the API
HOSTS = ("--host", "fl.example.org")
DEVICES = ("--device", "oslo=/srv/my data/$x.npz", "--device", "bern=/data/images")
KEYS = {"ca.crt", "server.crt", "server.key", "device.key", "local.crt", "local.key", "superexec.secret"}


def init(out: Path, *arguments: object) -> Path:
    result = deploy("init", out, *arguments, "--for", "kubernetes")
    assert result.exit_code == 0, result.output
    assert f"{out / 'kubernetes'}: the same for Kubernetes; no key is in it\n" in result.output
    return out


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A deployment behind a proxy, for two devices with data of their own."""
    return init(tmp_path_factory.mktemp("made") / "deployment", *HOSTS, *DEVICES)


def manifests(out: Path) -> list[dict]:
    """Return all manifests of a deployment, as they are in its files."""
    files = sorted((out / "kubernetes").rglob("*.yaml"))
    found = [one for file in files for one in yaml.safe_load_all(file.read_text())]
    return [one for one in found if one["kind"] != "Kustomization"]


def of_kind(out: Path, kind: str) -> dict[str, dict]:
    return {one["metadata"]["name"]: one for one in manifests(out) if one["kind"] == kind}


def pods(out: Path) -> dict[str, dict]:
    return {name: one["spec"]["template"]["spec"] for name, one in of_kind(out, "StatefulSet").items()}


def containers(out: Path) -> dict[str, dict]:
    return {one["name"]: one for pod in pods(out).values() for one in pod["containers"]}


# What the API takes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_the_schemas_of_the_api_take_every_manifest(version, made, tmp_path):
    others = init(tmp_path / "d", "--host", "superlink.fedapp.svc", "--partitions", 1, "--no-proxy")
    checked = [*manifests(made), *manifests(others)]
    assert {one["kind"] for one in checked} == {"Namespace", "StatefulSet", "Service", "NetworkPolicy"}
    for one in checked:
        assert kubernetes_validate.validate(one, version, strict=True) == version
    broken = of_kind(made, "StatefulSet")["oslo"]
    broken["spec"]["template"]["spec"]["containers"][0]["probe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="probe"):
        kubernetes_validate.validate(broken, version, strict=True)


def test_what_an_api_server_checks_beside_the_schemas(made):
    for machine, pod in pods(made).items():
        volumes = {volume["name"] for volume in pod["volumes"]} | {"state"}
        names = [one["name"] for one in pod["containers"]]
        assert len(set(names)) == len(names)
        for one in pod["containers"]:
            assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", one["name"])
            paths = [mount["mountPath"] for mount in one["volumeMounts"]]
            assert len(set(paths)) == len(paths), (machine, one["name"])
            assert {mount["name"] for mount in one["volumeMounts"]} <= volumes
            assert all(path.startswith("/") and ":" not in path for path in paths)
    for one in of_kind(made, "StatefulSet").values():
        labels = one["spec"]["template"]["metadata"]["labels"]
        assert one["spec"]["selector"]["matchLabels"].items() <= labels.items()
    service = of_kind(made, "Service")["superlink"]["spec"]
    assert service["selector"] == of_kind(made, "StatefulSet")["superlink"]["metadata"]["labels"]
    assert [port["targetPort"] for port in service["ports"]] == ["https"]
    assert containers(made)["proxy"]["ports"] == [{"name": "https", "containerPort": 8000}]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_kustomize_builds_all_together_and_each_machine_for_itself(made):
    def built(folder: Path) -> list[dict]:
        done = subprocess.run(["kubectl", "kustomize", folder], text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
        return list(yaml.safe_load_all(done.stdout))

    whole = built(made / "kubernetes")
    assert {one["metadata"]["namespace"] for one in whole} == {"fedapp"}
    maps = {one["metadata"]["name"]: one["data"] for one in whole if one["kind"] == "ConfigMap"}
    for one in whole:
        if one["kind"] == "StatefulSet":
            pod = one["spec"]["template"]["spec"]
            (named,) = [v["configMap"]["name"] for v in pod["volumes"] if "configMap" in v]
            assert named.startswith(f"{one['metadata']['name']}-config-")  # its hash: a change is a new Pod
            file = (
                "superlink/nginx.conf"
                if named.startswith("superlink")
                else f"{one['metadata']['name']}/node.toml"
            )
            text = (made / file.replace("superlink/nginx", "proxy/nginx")).read_text()
            assert maps[named] == {Path(file).name: text}
            images = {container["image"] for container in pod["containers"]}
            assert images <= {"fedapp:0.1.0", "nginx:stable"}
        kubernetes_validate.validate(one, VERSIONS[-1], strict=True)
    parts = [built(made / "kubernetes" / name) for name in ("superlink", "oslo", "bern")]

    def key(one: dict) -> tuple[str, str]:
        return one["kind"], one["metadata"]["name"]

    assert sorted([one for part in parts for one in part], key=key) == sorted(whole, key=key)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_the_guides_own_kustomization_sets_the_image_and_a_gpu(tmp_path):
    blocks = blocks_of("docs/orchestration.md")
    (own,) = [block.code for block in blocks if block.title == "kustomization.yaml"]
    (command,) = [block.code for block in blocks if "--for kubernetes" in block.code]
    arguments = command.replace("\\\n", " ").split()
    assert arguments[3] == "cluster"
    assert deploy("init", tmp_path / "cluster", *arguments[4:]).exit_code == 0
    (tmp_path / "kustomization.yaml").write_text(own)
    done = subprocess.run(["kubectl", "kustomize", tmp_path], text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    built = {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(done.stdout)}
    oslo = built["StatefulSet", "oslo"]["spec"]["template"]["spec"]["containers"]
    assert {one["image"] for one in oslo} == {"registry.example.org/fedapp:0.1.0"}
    limits = {one["name"]: one["resources"]["limits"].get("nvidia.com/gpu") for one in oslo}
    assert limits == {"oslo": None, "oslo-superexec": 1, "oslo-worker": 1}
    # The Secrets of the guide have what the Pods mount.
    made = next(block.code for block in blocks if "create secret" in block.code)
    for machine, folder in (("superlink", "superlink"), ("oslo", "$name")):
        given = set(re.findall(rf"--from-file={re.escape(folder)}/(\S+)", made))
        mounted = {
            mount["subPath"]
            for one in built["StatefulSet", machine]["spec"]["template"]["spec"]["containers"]
            for mount in one["volumeMounts"]
            if mount["name"] == "keys"
        }
        assert given == mounted


# One plan ------------------------------------------------------------------------------------------------------


def test_pods_start_what_the_units_start(made):
    found = containers(made)
    assert found.pop("proxy")["image"] == "nginx:stable"
    deployment = read_deployment(made)
    assert list(found) == [service.name for service in sorted(deployment.services, key=lambda s: s.machine)]
    for service in deployment.services:
        one = found[service.name]
        own = f"{deployment.home}/{service.folder}"
        assert one["command"] == service.command
        variables = {pair["name"]: pair["value"] for pair in one["env"]}
        assert variables == {"HOME": own, **service.environment(deployment.home)}
        mounted = {mount["mountPath"]: mount["name"] for mount in one["volumeMounts"]}
        assert mounted[own] == "state"
        named = {word for word in service.command if word.startswith(f"{deployment.home}/")}
        assert named - {f"{own}/superlink.db"} == {
            path for path, volume in mounted.items() if volume in ("keys", "config")
        }
        assert one["resources"]["limits"]["memory"]
        assert set(one["resources"]["requests"]) == {"cpu", "memory"}
    oslo = {mount["mountPath"]: mount for mount in found["oslo-worker"]["volumeMounts"]}
    assert oslo["/srv/my data"] == {"name": "data", "mountPath": "/srv/my data", "readOnly": True}


def test_keys_are_secrets_by_name_that_the_code_of_runs_does_not_see(made):
    for name, content in contents(made / "kubernetes").items():
        assert b"PRIVATE KEY" not in content, name
    for machine, pod in pods(made).items():
        secrets = [volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume]
        assert secrets == [f"{machine}-keys"]
    for name, one in containers(made).items():
        seen = {mount["subPath"] for mount in one["volumeMounts"] if mount["name"] == "keys"}
        of_apps = name.endswith(("superexec", "worker"))
        assert seen <= ({"ca.crt", "local.crt", "superexec.secret"} if of_apps else KEYS), name
        assert one["securityContext"]["runAsUser"] == (APPS_USER if of_apps else FLOWER_USER)


def test_no_container_has_more_than_the_restricted_profile_allows(made):
    (namespace,) = of_kind(made, "Namespace").values()
    assert namespace["metadata"]["labels"] == {"pod-security.kubernetes.io/enforce": "restricted"}
    for pod in pods(made).values():
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        assert {key for volume in pod["volumes"] for key in volume} <= {
            "name",
            "secret",
            "configMap",
            "emptyDir",
            "persistentVolumeClaim",
        }
    for one in containers(made).values():
        confined = one["securityContext"]
        assert confined["allowPrivilegeEscalation"] is False
        assert confined["capabilities"] == {"drop": ["ALL"]}
        assert confined["readOnlyRootFilesystem"] is True


# Network -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "kind"),
    [
        ("superlink", None),
        ("superlink.fedapp.svc", None),
        ("superlink.fedapp.svc.cluster.local", None),
        ("fl.example.org", "LoadBalancer"),
        ("192.0.2.10", "LoadBalancer"),
        ("2001:db8::5", "LoadBalancer"),
    ],
)
def test_devices_outside_the_cluster_have_an_address(host, kind, tmp_path):
    out = init(tmp_path / "d", "--host", host, "--device", "oslo=/data/oslo.npz")
    spec = of_kind(out, "Service")["superlink"]["spec"]
    assert spec.get("type") == kind
    assert spec.get("externalTrafficPolicy") == (kind and "Local")
    superlink = of_kind(out, "NetworkPolicy")["oslo"]["spec"]["egress"][0]
    assert superlink["ports"] == [{"port": 8000, "protocol": "TCP"}]
    assert ("to" in superlink) is (kind is None)


def test_a_device_with_data_talks_with_the_superlink_alone(made, tmp_path):
    spec = of_kind(made, "NetworkPolicy")["oslo"]["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert spec["ingress"] == []
    assert {port["port"] for rule in spec["egress"] for port in rule["ports"]} == {8000, 53}
    # One that may have to fetch a dataset isn't kept from that.
    out = init(tmp_path / "d", *HOSTS, "--partitions", 1)
    assert of_kind(out, "NetworkPolicy")["device-0"]["spec"]["egress"] == [{}]
    assert "data" not in {volume["name"] for volume in pods(out)["device-0"]["volumes"]}


def test_without_a_proxy_the_superlink_has_the_port(tmp_path):
    out = init(tmp_path / "d", *HOSTS, *DEVICES, "--no-proxy")
    found = containers(out)
    assert "proxy" not in found
    assert found["superlink"]["ports"] == [{"name": "https", "containerPort": 8000}]
    assert not (out / "kubernetes" / "superlink" / "nginx.conf").exists()


# The folder ----------------------------------------------------------------------------------------------------


def test_devices_come_and_go(tmp_path, monkeypatch):
    out = init(tmp_path / "d", *HOSTS, *DEVICES)
    before = contents(out / "kubernetes")
    assert deploy("add", out, "lima=/data/lima.npz").exit_code == 0
    after = contents(out / "kubernetes")
    assert {name for name in after if after[name] != before.get(name)} == {
        "kustomization.yaml",
        "lima/kustomization.yaml",
        "lima/lima.yaml",
        "lima/node.toml",
    }
    assert deploy("refresh", out).exit_code == 0
    assert contents(out / "kubernetes") == after
    monkeypatch.setattr("fedapp.deploy.operate.retire", lambda *_: "")  # no SuperLink here
    assert deploy("remove", out, "lima").exit_code == 0
    assert contents(out / "kubernetes") == before


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--device", "oslo-=/data/x"), "--device 'oslo-': Kubernetes wants a name of 1 to 52 characters"),
        (("--device", f"{'o' * 53}=/data/x"), "--device 'ooo"),
        (("--device", "oslo=/x.npz"), "--device oslo=/x.npz: a Pod mounts the folder above the data"),
        (("--device", "oslo=/opt/x.npz"), "--device oslo=/opt/x.npz: a Pod mounts"),
        (("--device", "oslo=/opt/fedapp/oslo/x.npz"), "--device oslo=/opt/fedapp/oslo/x.npz: a Pod mounts"),
        (("--device", "oslo=/data/../tmp/x.npz"), "--device oslo=/data/../tmp/x.npz: a Pod mounts"),
        (("--device", "oslo=/da:ta/x.npz"), "--device oslo=/da:ta/x.npz: a Pod mounts"),
        (("--device", "oslo=/data/x", "--for", "nomad"), "--for 'nomad': must be one of kubernetes"),
    ],
)
def test_what_no_pod_can_be_is_one_line_and_nothing_is_written(arguments, text, tmp_path):
    result = deploy("init", tmp_path / "d", *HOSTS, *arguments, "--for", "kubernetes")
    assert result.exit_code == 1
    assert result.output.startswith(f"error: {text}")
    assert len(result.output.splitlines()) == 1
    assert not (tmp_path / "d").exists()


# What runs here ------------------------------------------------------------------------------------------------


@pytest.mark.ci
@pytest.mark.thorough
def test_probes_find_real_processes_well_and_notice_their_end(tmp_path):
    with LocalDeployment(tmp_path / "d", [{"partition-id": 0, "num-partitions": 1}]) as local:
        services = [service for service in local.deployment.services if not service.runs_apps]
        plan = replace(local.deployment, orchestrators=("kubernetes",))
        texts = startup_files(local.folder, plan)
        probes = {}
        for service in services:
            text = texts[f"kubernetes/{service.machine}/{service.machine}.yaml"]
            (pod,) = [one for one in yaml.safe_load_all(text) if one["kind"] == "StatefulSet"]
            (container,) = [
                c for c in pod["spec"]["template"]["spec"]["containers"] if c["name"] == service.name
            ]
            asked = [container[kind]["exec"] for kind in ("startupProbe", "readinessProbe", "livenessProbe")]
            assert asked[0] == asked[1] == asked[2]
            probes[service.name] = asked[0]["command"]

        def well(name: str) -> bool:
            command = [str(BIN / probes[name][0]), *probes[name][1:]]
            return subprocess.run(command, capture_output=True).returncode == 0

        # A SuperNode is well while its SuperLink is away: it tries again by itself.
        for name in ("device-0", "superlink"):
            assert not well(name)
            start = (
                local.start_superlink if name == "superlink" else lambda: local.start_supernode("device-0")
            )
            process = start()
            end = time.monotonic() + 120
            while not well(name):
                assert process.poll() is None, local.log(name).read_text()
                assert time.monotonic() < end, local.log(name).read_text()
                time.sleep(0.5)
            local.kill(name)
            assert not well(name)


@pytest.mark.skipif(
    importlib.util.find_spec("hatchling") is None, reason="hatchling, which builds the wheel, isn't installed"
)
def test_what_the_dockerfile_copies_is_enough_to_install(repository, tmp_path):
    """The image isn't built here: no daemon. What it installs is."""
    lines = (repository / "Dockerfile").read_text().splitlines()
    ignored, *let_in = (repository / ".dockerignore").read_text().splitlines()[1:]
    assert ignored == "*"
    copied = [name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]]
    assert let_in == [*(f"!{name}" for name in copied), "**/__pycache__"]
    source = tmp_path / "app"
    source.mkdir()
    for words in (line.split()[1:] for line in lines if line.startswith("COPY ")):
        for name in words[:-1]:
            copy = shutil.copytree if (repository / name).is_dir() else shutil.copy
            copy(
                repository / name,
                source / PurePosixPath(words[-1]).name / ("" if (repository / name).is_dir() else name),
            )
    build = "from hatchling.build import build_wheel; print(build_wheel('..'))"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {"fedapp/pyproject.toml", "fedapp/deploy/supernode.py", "strategies/__init__.py"} <= names
    assert any(name.startswith("custom/") for name in names)
    compose = yaml.safe_load((init(tmp_path / "d", *HOSTS, *DEVICES) / "compose.yaml").read_text())
    assert compose["x-build"] == {"context": "${FEDAPP_SOURCE:-..}"}  # of which compose reads the Dockerfile
