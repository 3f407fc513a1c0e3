"""Kustomize folders for Kubernetes: a machine's processes as the containers of one Pod.

A Pod's containers share a loopback, so the SuperLink, which has no login, stays behind its proxy there, and each
process has the command line of its systemd unit. The code of runs is in containers of its own, as another user,
where no key is mounted. The manifests name Secrets; keys are in none of these files.
"""

import json
import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import PurePosixPath
from typing import Any

import yaml

from fedapp.deploy.orchestration.compose import APPS_USER, FLOWER_USER, PROXY_FILES
from fedapp.deploy.plan import (
    DATABASE,
    LOOPBACK,
    NODE_CONFIG,
    SUPEREXEC,
    DeployError,
    Deployment,
    Device,
    Service,
)

FOLDER = "kubernetes"
NAMESPACE = "fedapp"
_MOST_OF_A_NAME = 52  # characters of a StatefulSet's name: its Pods' labels are 11 longer, of 63 at most
_STATE, _KEYS, _CONFIG, _DATA, _TMP = "state", "keys", "config", "data", "tmp"

# CPUs asked for, memory asked for, most memory; and the size of the machine's volume.
_RESOURCES = {
    "superlink": ("500m", "512Mi", "4Gi"),
    "superexec": ("1", "2Gi", "8Gi"),
    "proxy": ("50m", "32Mi", "256Mi"),
    "supernode": ("100m", "256Mi", "1Gi"),
    "apps": ("1", "1Gi", "8Gi"),
}
_SERVER_VOLUME, _DEVICE_VOLUME = "20Gi", "2Gi"

# A kubelet reaches no loopback of a Pod, so that the container asks: with the certificate that it trusts.
_HEALTH = (
    "import ssl, sys, urllib.request as r; "
    "r.urlopen(sys.argv[1], timeout=4, context=ssl.create_default_context(cafile=sys.argv[2]))"
)
_CONFINED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}

Manifest = dict[str, Any]


def kubernetes_files(deployment: Deployment, proxy: str, nodes: Mapping[str, str]) -> dict[str, str]:
    """Return the text of each file, by its path below the deployment's folder.

    Parameters
    ----------
    deployment : Deployment
    proxy : str
        nginx's configuration; "" if no proxy is in front of the SuperLink.
    nodes : mapping of str to str
        Each device's node.toml.

    Raises
    ------
    DeployError
        If Kubernetes can't have a Pod of a device's name, or can't mount the folder of a device's data.
    """
    machines = ["superlink", *(device.name for device in deployment.devices)]
    files = {
        "namespace.yaml": _yaml(_namespace()),
        "kustomization.yaml": _yaml(_kustomization({"resources": machines})),
        "superlink/kustomization.yaml": _machine("superlink", {"nginx.conf": proxy} if proxy else {}),
        "superlink/superlink.yaml": _yaml(_server_pod(deployment), _entrance(deployment)),
    }
    if proxy:
        files["superlink/nginx.conf"] = proxy
    for device in deployment.devices:
        _check(deployment, device)
        name = device.name
        files[f"{name}/kustomization.yaml"] = _machine(name, {"node.toml": nodes[name]})
        files[f"{name}/node.toml"] = nodes[name]
        files[f"{name}/{name}.yaml"] = _yaml(_device_pod(deployment, device), _network(deployment, device))
    return {f"{FOLDER}/{name}": text for name, text in files.items()}


def _check(deployment: Deployment, device: Device) -> None:
    """Check a device's name and the folder of its data, which is mounted from a claim."""
    name = device.name
    if len(name) > _MOST_OF_A_NAME or name.endswith("-"):
        raise DeployError(
            f"--device {name!r}: Kubernetes wants a name of 1 to {_MOST_OF_A_NAME} characters, no - last"
        )
    path = str(device.node_config.get("data-path", ""))
    if not path:
        return
    folder = PurePosixPath(path).parent
    taken = [PurePosixPath(deployment.home), PurePosixPath("/tmp")]
    nested = any(one.is_relative_to(other) for own in taken for one, other in ((folder, own), (own, folder)))
    if nested or {"..", "."} & set(path.split("/")) or ":" in path:
        raise DeployError(
            f"--device {name}={path}: a Pod mounts the folder above the data, which must be neither / nor in or "
            f"above {deployment.home} or /tmp, without .. and :, such as /data"
        )


# ---- Kustomize ---------------------------------------------------------------------------------------------------


def _kustomization(content: Manifest) -> Manifest:
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": NAMESPACE,
        **content,
    }


def _machine(name: str, files: Mapping[str, str]) -> str:
    """Return a machine's kustomization.yaml; a ConfigMap of its files has a name that changes with them."""
    content: Manifest = {
        "resources": [f"{name}.yaml"],
        "images": [{"name": "fedapp", "newTag": version("fedapp")}],
    }
    if files:
        content["configMapGenerator"] = [{"name": _config_map(name), "files": list(files)}]
    return _yaml(_kustomization(content))


def _config_map(machine: str) -> str:
    return f"{machine}-config"


def _namespace() -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": NAMESPACE, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}},
    }


# ---- Pods --------------------------------------------------------------------------------------------------------


def _server_pod(deployment: Deployment) -> Manifest:
    services = [service for service in deployment.services if service.is_server]
    containers = [_container(deployment, service) for service in services]
    if deployment.backend:
        containers.append(_proxy(deployment))
    else:
        containers[0]["ports"] = [_port(deployment)]
    return _pod("superlink", containers, _SERVER_VOLUME, config=bool(deployment.backend))


def _device_pod(deployment: Deployment, device: Device) -> Manifest:
    services = [service for service in deployment.services if service.machine == device.name]
    containers = [_container(deployment, service) for service in services]
    return _pod(device.name, containers, _DEVICE_VOLUME, config=True, data="data-path" in device.node_config)


def _pod(
    machine: str, containers: list[Manifest], size: str, *, config: bool, data: bool = False
) -> Manifest:
    """Return a StatefulSet of one Pod: two SuperLinks on one database, or two SuperNodes with one key, never run."""
    volumes: list[Manifest] = [
        {"name": _KEYS, "secret": {"secretName": f"{machine}-keys", "defaultMode": 0o440}},
        {"name": _TMP, "emptyDir": {}},
    ]
    if config:
        volumes.append({"name": _CONFIG, "configMap": {"name": _config_map(machine)}})
    if data:
        claim = {"claimName": f"{machine}-data", "readOnly": True}
        volumes.append({"name": _DATA, "persistentVolumeClaim": claim})
    state = {
        "metadata": {"name": _STATE},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}}},
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": machine, "labels": _labels(machine)},
        "spec": {
            "serviceName": machine,
            "replicas": 1,
            "selector": {"matchLabels": _labels(machine)},
            "template": {
                "metadata": {"labels": _labels(machine)},
                "spec": {
                    "automountServiceAccountToken": False,
                    "enableServiceLinks": False,
                    "securityContext": {
                        "runAsNonRoot": True,
                        "fsGroup": FLOWER_USER,  # may read the keys, and write to the volume
                        "seccompProfile": {"type": "RuntimeDefault"},
                    },
                    "containers": containers,
                    "volumes": volumes,
                },
            },
            "volumeClaimTemplates": [state],
        },
    }


def _labels(machine: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "fedapp", "app.kubernetes.io/instance": machine}


def _container(deployment: Deployment, service: Service) -> Manifest:
    own = f"{deployment.home}/{service.folder}"
    kind = "superlink" if service.name == "superlink" else "supernode"
    if service.runs_apps:
        kind = "superexec" if service.is_server else "apps"
    variables = {"HOME": own, **service.environment(deployment.home)}
    return {
        "name": service.name,
        "image": "fedapp",
        "command": service.command,
        "workingDir": own,
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        "securityContext": _user(APPS_USER if service.runs_apps else FLOWER_USER),
        "resources": _resources(kind),
        **_probes(deployment, service),
        "volumeMounts": _mounts(deployment, service),
    }


def _mounts(deployment: Deployment, service: Service) -> list[Manifest]:
    """Return what a container sees: its own folder, the files that its command names, and for runs' code the data."""
    own, machine = (f"{deployment.home}/{name}" for name in (service.folder, service.machine))
    mounts = [_mount(_STATE, own, PurePosixPath(own).name)]
    if service.is_server and not service.runs_apps:  # the SuperLink reads runs' folders
        mounts.append(_mount(_STATE, f"{machine}/{SUPEREXEC}", SUPEREXEC, read_only=True))
    for word in dict.fromkeys(service.command):
        name = PurePosixPath(word).name
        if word.startswith(f"{machine}/") and name != DATABASE:
            mounts.append(_mount(_CONFIG if name == NODE_CONFIG else _KEYS, word, name, read_only=True))
    if service.runs_apps and service.data:
        mounts.append(_mount(_DATA, str(PurePosixPath(service.data).parent), read_only=True))
    return [*mounts, _mount(_TMP, "/tmp", service.name)]


def _mount(volume: str, path: str, part: str = "", *, read_only: bool = False) -> Manifest:
    mount: Manifest = {"name": volume, "mountPath": path}
    if part:
        mount["subPath"] = part
    return {**mount, "readOnly": True} if read_only else mount


def _probes(deployment: Deployment, service: Service) -> Manifest:
    """Return a container's probes; a SuperExec has none beside its process, which ends with it."""
    if service.is_worker:
        socket = service.environment(deployment.home)["FEDAPP_WORKER"]
        return {"readinessProbe": {"exec": {"command": ["test", "-S", socket]}, "periodSeconds": 10}}
    if service.runs_apps:
        return {}
    own = f"{deployment.home}/{service.machine}"
    if service.is_server:
        address, certificate = deployment.superlink_address, f"{own}/ca.crt"
    else:
        device = deployment.device(service.machine)
        address, certificate = f"{LOOPBACK}:{device.port}", f"{own}/local.crt"
    asked = {"exec": {"command": ["python", "-I", "-c", _HEALTH, f"https://{address}/health", certificate]}}
    probe = {**asked, "timeoutSeconds": 10}
    return {
        "startupProbe": {**probe, "periodSeconds": 5, "failureThreshold": 24},
        "readinessProbe": {**probe, "periodSeconds": 30},
        "livenessProbe": {**probe, "periodSeconds": 30, "failureThreshold": 5},
    }


def _proxy(deployment: Deployment) -> Manifest:
    own = f"{deployment.home}/superlink"
    mounts = [_mount(_CONFIG, "/etc/nginx/conf.d/default.conf", "nginx.conf", read_only=True)]
    mounts += [_mount(_KEYS, f"{own}/{name}", name, read_only=True) for name in PROXY_FILES]
    mounts += [
        _mount(_TMP, path, f"proxy{path.replace('/', '-')}") for path in ("/tmp", "/run", "/var/cache/nginx")
    ]
    alive = {"tcpSocket": {"port": deployment.port}, "periodSeconds": 10}
    return {
        "name": "proxy",
        "image": "nginx:stable",
        "ports": [_port(deployment)],
        "securityContext": _user(FLOWER_USER),
        "resources": _resources("proxy"),
        "readinessProbe": alive,
        "livenessProbe": alive,
        "volumeMounts": mounts,
    }


def _port(deployment: Deployment) -> Manifest:
    return {"name": "https", "containerPort": deployment.port}


def _user(number: int) -> Manifest:
    return {"runAsUser": number, "runAsGroup": number, **_CONFINED}


def _resources(kind: str) -> Manifest:
    cpu, memory, most = _RESOURCES[kind]
    return {"requests": {"cpu": cpu, "memory": memory}, "limits": {"memory": most}}


# ---- Network -----------------------------------------------------------------------------------------------------


def _entrance(deployment: Deployment) -> Manifest:
    """Return the SuperLink's Service: within the cluster, or at an address of its own for devices elsewhere."""
    spec: Manifest = {
        "selector": _labels("superlink"),
        "ports": [{"name": "https", "port": deployment.port, "targetPort": "https"}],
    }
    if not _in_cluster(deployment):
        # Local: the proxy's limits are of a device's own address.
        spec |= {"type": "LoadBalancer", "externalTrafficPolicy": "Local"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "superlink", "labels": _labels("superlink")},
        "spec": spec,
    }


def _in_cluster(deployment: Deployment) -> bool:
    """Tell whether devices connect to a Service's name: ``superlink``, ``superlink.fedapp.svc`` …."""
    return bool(re.fullmatch(r"[^.:]+|.+\.svc(\.cluster\.local)?", deployment.hosts[0]))


def _network(deployment: Deployment, device: Device) -> Manifest:
    """Return who may talk with a device's Pod: nobody; and it with DNS, and with the SuperLink's port."""
    egress: list[Manifest] = [{}]  # anywhere: a run's dataset may have to be fetched
    if "data-path" in device.node_config:
        superlink: Manifest = {"ports": [{"port": deployment.port, "protocol": "TCP"}]}
        if _in_cluster(deployment):
            superlink["to"] = [{"podSelector": {"matchLabels": _labels("superlink")}}]
        dns = {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]}
        egress = [superlink, dns]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": device.name, "labels": _labels(device.name)},
        "spec": {
            "podSelector": {"matchLabels": _labels(device.name)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [],
            "egress": egress,
        },
    }


def _yaml(*documents: Manifest) -> str:
    # By way of JSON: of a mapping in two places YAML would write the second as an alias, which no overlay can patch.
    written = [json.loads(json.dumps(document)) for document in documents]
    return str(yaml.safe_dump_all(written, sort_keys=False, width=110))
