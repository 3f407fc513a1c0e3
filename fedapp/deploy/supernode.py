"""Flower's SuperNode, in a process that ends when the SuperNode does: so that its unit knows, and starts it again.

After an answer that it doesn't expect (500, say, from a SuperLink whose disk is full) Flower 1.41's SuperNode leaves
its loop, and the process stays: its own API answers that it is healthy, and the device takes part in nothing.

Where a ClientApp's task expires before the ClientApp has fetched its message (a device that sleeps in this moment,
say), Flower's SuperNode (1.41 to 1.43) waits for ever for a reply, and takes no other message. It ends, too.

Over a slow link Flower's SuperNode gives up objects that it uploads, and then the whole reply. Here it doesn't.

A site's own rules (fedapp/client/site_rules.py) may be in ``site.toml`` beside the node config's file, where start-up
files that are written anew don't replace them. The apps that a site allows are checked here, before their code runs.

A SuperLink refuses requests of a device whose clock is wrong in the words in which it refuses an unknown key. So a
SuperNode that ends compares its clock with the SuperLink's, and says what is wrong.
"""

import argparse
import itertools
import os
import ssl
import sys
import time
import tomllib
import urllib.request
from collections.abc import Sequence
from email.utils import parsedate_to_datetime
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

COMMAND = "flower-supernode"
# Seconds by which the time of a request may be ahead of the SuperLink's clock, or behind (Flower 1.41).
MOST_AHEAD, MOST_BEHIND = 5, 305
TIMEOUT = 3.0  # seconds until the SuperLink must tell its time
SITE_FILE = "site.toml"


def main() -> None:
    """Be a SuperNode, with the arguments of Flower's command, and end with it, whatever else still runs."""
    (command,) = entry_points(group="console_scripts", name=COMMAND)
    sys.argv[0] = COMMAND
    code: object = 1
    end_where_no_reply_can_come()
    upload_steadily()
    try:
        keep_rules(sys.argv[1:])
        command.load()()
        print("the SuperNode has left its loop, for the reason above", file=sys.stderr)
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    finally:
        if remark := clock_remark(sys.argv[1:]):
            print(remark, file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code if isinstance(code, int) else 1)


def end_where_no_reply_can_come() -> bool:
    """End this process once a task expires whose message wasn't fetched; False where Flower has no such hook."""
    from strategies.flower import internals

    def end() -> None:
        print(
            "ERROR: the ClientApp's task expired before it had fetched its message, and no reply will come: "
            "the SuperNode ends, so that its unit starts it again",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    return internals.on_unfetched_task(end)


def upload_steadily() -> bool:
    """Let Flower's SuperNode in this process upload over slow links, and go on after a cut; False: it can't."""
    from strategies.flower import internals

    return internals.steady_uploads()


def keep_rules(arguments: Sequence[str]) -> None:
    """Read the site's rules, and let Flower's SuperNode in this process run the apps alone that they allow.

    Raises
    ------
    SystemExit
        With one line, if a rule can't be read.
    """
    from fedapp.client.device_log import FILE
    from fedapp.client.site_rules import ALLOW_APPS, SiteRuleError, SiteRules, refusal
    from fedapp.deploy.shared_logs import share
    from strategies.flower import internals

    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    for name in ("--node-config", "--superlink", "--root-certificates", "--auth-supernode-private-key"):
        parser.add_argument(name, default="")
    options = parser.parse_known_args(arguments)[0]
    given = options.node_config
    try:
        own = site_file(Path(given).with_name(SITE_FILE)) if given.endswith(".toml") else {}
        rules = SiteRules.read({**(internals.read_pairs([given]) if given else {}), **own})
    except SiteRuleError as error:
        raise SystemExit(f"error: this site's rules: {error}") from None

    def node_config(flowers: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in {**flowers, **own}.items() if key != ALLOW_APPS}

    def check(name: str, digest: str) -> None:
        try:
            rules.check_app(name, digest)
        except SiteRuleError as error:
            raise internals.AppRefusedError(str(error)) from None

    number = itertools.count(1)
    if own or rules.apps:
        internals.check_apps(
            node_config, check, lambda reason: refusal(reason, f"{next(number)} since its start")
        )
    if rules.shares_logs:
        if not options.root_certificates or not options.auth_supernode_private_key:
            raise SystemExit(
                "error: share-logs = true: needs --root-certificates and --auth-supernode-private-key"
            )
        app_log = Path(rules.folder, FILE) if rules.folder else None
        share(options.superlink, options.root_certificates, Path(options.auth_supernode_private_key), app_log)
    if rules.is_open:
        print(
            f"WARNING: the site has rules but no {ALLOW_APPS}: whoever starts a run brings its code, which may not "
            "keep them",
            file=sys.stderr,
        )


def site_file(path: Path) -> dict[str, Any]:
    """Return the rules in a file; none if it isn't there.

    Raises
    ------
    SiteRuleError
        If the file can't be read, or has other keys than rules.
    """
    from fedapp.client.site_rules import RULES, SiteRuleError

    try:
        given = tomllib.loads(path.read_text("utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise SiteRuleError(f"{path}: can't be read ({error})") from None
    if unknown := sorted(given.keys() - set(RULES)):
        raise SiteRuleError(f"{path}: {unknown[0]} is no rule; allowed are {', '.join(RULES)}")
    return given


def clock_remark(arguments: Sequence[str]) -> str:
    """Return a line that says how wrong this device's clock is; "" if it is right or the SuperLink can't be asked."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--superlink", default="")
    parser.add_argument("--root-certificates")
    options, _ = parser.parse_known_args(arguments)
    try:
        trust = ssl.create_default_context(cafile=options.root_certificates)
        url = f"https://{options.superlink}/health"
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT, context=trust) as answer:
                date = answer.headers["Date"]
        except HTTPError as refused:  # a proxy that lets devices' requests alone pass
            date = refused.headers["Date"]
        ahead = time.time() - parsedate_to_datetime(date).timestamp()
    except (OSError, ValueError, TypeError):
        return ""
    # The date has whole seconds: it is up to a second behind.
    if -MOST_BEHIND <= ahead <= MOST_AHEAD + 1:
        return ""
    wrong = f"{ahead:.0f} s ahead of" if ahead > 0 else f"{-ahead:.0f} s behind"
    return (
        f"ERROR: this device's clock is {wrong} the clock of {options.superlink}, which refuses requests of "
        f"devices more than {MOST_AHEAD} s ahead or {MOST_BEHIND} s behind: set the clock, with NTP say"
    )


if __name__ == "__main__":
    main()
