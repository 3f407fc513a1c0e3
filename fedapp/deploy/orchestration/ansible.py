"""An Ansible play that installs devices with the systemd units of their folders, and an inventory of them."""

from typing import Any

import yaml

from fedapp.deploy.plan import Deployment

FOLDER = "ansible"

_INVENTORY = """\
# 'fedapp deploy add' and 'refresh' write this file anew. A device's address and login belong in host_vars/NAME.yaml
# beside it (ansible_host, ansible_user), or in ~/.ssh/config.
"""

_PLAY = """\
# Install the app and the systemd units of devices, and start them (docs/orchestration.md):
#   ansible-playbook -i ansible/inventory.yaml ansible/devices.yaml --extra-vars wheel=$PWD/dist/fedapp-….whl
# Tags of its parts: users, install, files, start.
- name: Devices of fedapp
  hosts: devices
  become: true
  vars:
    # Of the machine that runs this play.
    deployment: "{{ playbook_dir | dirname }}"
    constraints: "{{ wheel | dirname | dirname }}/constraints.txt"
    # Of a device. Its Python is the system's: the services' users can't run one in a home directory.
    python: /usr/bin/python3
    pip_arguments: "--constraint {{ home }}/constraints.txt"
    units: /etc/systemd/system
    flower_user: fedapp-supernode
    apps_user: fedapp-superexec  # runs the code of runs, and can't read keys
    device: "{{ inventory_hostname }}"
    services: ["fedapp-{{ device }}-worker", "fedapp-{{ device }}-superexec", "fedapp-{{ device }}"]
    files: "{{ query('ansible.builtin.fileglob', deployment ~ '/' ~ device ~ '/*') }}"

  handlers:
    - name: Restart the services
      when: ansible_facts.service_mgr == "systemd"
      ansible.builtin.systemd_service:
        name: "{{ item }}"
        state: restarted
        daemon_reload: true
      loop: "{{ services }}"

  tasks:
    - name: Make the users
      tags: users
      ansible.builtin.user:
        name: "{{ item }}"
        system: true
        home: "{{ home }}"
        create_home: false
      loop: ["{{ flower_user }}", "{{ apps_user }}"]

    - name: Make the folder of the installation
      tags: install
      ansible.builtin.file:
        path: "{{ home }}"
        state: directory
        mode: "0755"
    - name: Copy the versions of what the app needs
      tags: install
      ansible.builtin.copy:
        src: "{{ constraints }}"
        dest: "{{ home }}/constraints.txt"
        mode: "0644"
    - name: Copy the app
      tags: install
      ansible.builtin.copy:
        src: "{{ wheel }}"
        dest: "{{ home }}/{{ wheel | basename }}"
        mode: "0644"
      register: app
      notify: Restart the services
    - name: Remove another app of the same version
      tags: install
      when: app is changed
      ansible.builtin.pip:
        name: fedapp
        state: absent
        virtualenv: "{{ home }}/.venv"
        virtualenv_command: "{{ python }} -m venv"
    - name: Install the app
      tags: install
      ansible.builtin.pip:
        name: "{{ home }}/{{ wheel | basename }}"
        virtualenv: "{{ home }}/.venv"
        virtualenv_command: "{{ python }} -m venv"
        extra_args: "{{ pip_arguments }}"

    - name: Make the device's folder
      tags: files
      ansible.builtin.file:
        path: "{{ home }}/{{ device }}"
        state: directory
        owner: "{{ flower_user }}"
        group: "{{ flower_user }}"
        mode: "0755"
    - name: Make the folder of the code of runs
      tags: files
      ansible.builtin.file:
        path: "{{ home }}/{{ device }}/superexec"
        state: directory
        owner: "{{ apps_user }}"
        group: "{{ apps_user }}"
        mode: "0755"
    - name: Copy the device's keys, certificates and node config
      tags: files
      ansible.builtin.copy:
        src: "{{ item }}"
        dest: "{{ home }}/{{ device }}/{{ item | basename }}"
        owner: "{{ flower_user }}"
        group: "{{ flower_user }}"
        mode: "{{ '0644' if (item | splitext)[1] in ('.crt', '.toml', '.pub') else '0600' }}"
      loop: "{{ files | reject('match', '.*[.](service|sh)$') }}"
      loop_control: {label: "{{ item | basename }}"}
      notify: Restart the services
    - name: Copy the secret of the device's SuperExec, unless the device made it itself
      tags: files
      when: (deployment ~ '/' ~ device ~ '/superexec/superexec.secret') is file
      ansible.builtin.copy:
        src: "{{ deployment }}/{{ device }}/superexec/superexec.secret"
        dest: "{{ home }}/{{ device }}/superexec/superexec.secret"
        owner: "{{ apps_user }}"
        group: "{{ apps_user }}"
        mode: "0600"
      notify: Restart the services
    - name: Copy the units
      tags: files
      ansible.builtin.copy:
        src: "{{ deployment }}/{{ device }}/{{ item }}.service"
        dest: "{{ units }}/{{ item }}.service"
        mode: "0644"
      loop: "{{ services }}"
      notify: Restart the services
    - name: Copy what starts the device where there is no systemd
      tags: files
      ansible.builtin.copy:
        src: "{{ deployment }}/{{ device }}/start.sh"
        dest: "{{ home }}/start-{{ device }}.sh"
        mode: "0755"
    - name: Try to read the device's data as the user of the code of runs
      tags: files
      when: data_path is defined
      ansible.builtin.command:
        argv: [runuser, -u, "{{ apps_user }}", --, test, -r, "{{ data_path }}"]
      register: data
      changed_when: false
      failed_when: false
      check_mode: false
    - name: Check that they can be read
      tags: files
      when: data_path is defined
      ansible.builtin.assert:
        that: data.rc == 0
        fail_msg: "{{ device }}: {{ apps_user }} can't read {{ data_path }}"
        quiet: true

    - name: Check that the device has systemd
      tags: start
      ansible.builtin.assert:
        that: ansible_facts.service_mgr == "systemd"
        fail_msg: >-
          {{ device }}: is started by {{ ansible_facts.service_mgr }}, and units need systemd; with --skip-tags start
          everything else is done, and {{ home }}/start-{{ device }}.sh starts the device
        quiet: true
    - name: Start the services, now and whenever the device starts
      tags: start
      ansible.builtin.systemd_service:
        name: "{{ item }}"
        enabled: true
        state: started
        daemon_reload: true
      loop: "{{ services }}"
"""


def ansible_files(deployment: Deployment) -> dict[str, str]:
    """Return the text of the play and of the inventory, by their paths below the deployment's folder."""
    hosts: dict[str, Any] = {}
    for device in deployment.devices:
        path = device.node_config.get("data-path")
        hosts[device.name] = {"data_path": path} if path else {}
    inventory = {"devices": {"vars": {"home": deployment.home}, "hosts": hosts}}
    return {
        f"{FOLDER}/inventory.yaml": _INVENTORY + str(yaml.safe_dump(inventory, sort_keys=False)),
        f"{FOLDER}/devices.yaml": _PLAY,
    }
