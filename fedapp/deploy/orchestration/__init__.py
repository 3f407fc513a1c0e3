"""Start-up files beside the systemd units: for Compose, Kubernetes, Ansible, and a shell alone."""
