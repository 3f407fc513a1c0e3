"""Names of the field: none that the library had before for the same thing is defined anywhere."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Hooks, class attributes, parameters and exports, and the term that has taken the name's place.
PUBLIC = {
    "pace": "scheduler",
    "ledger": "task_table",
    "companions": "extra_vectors",
    "without_companions": "hint_without_extra_vectors",
    "outgoing": "extra_records",
    "received": "on_local_model",
    "counted": "transform_update",
    "direction": "server_update",
    "own_lr": "default_server_lr",
    "adapted": "resolve_config",
    "minimised": "objective_weights",
    "witness": "on_client_model",
    "at_work": "busy_clients",
    "most_tasks": "max_tasks_per_client",
    "bytes_kept": "client_state_bytes",
    "unseen_by_wrappers": "why_not_wrappable",
    "shares_of_clients": "client_columns",
    "choose": "select_idle",
    "sends_again": "resend_model",
    "takes": "take_from_buffer",
    "fresh": "is_fresh_enough",
    "works_on": "trains_while_waiting",
    "every_arrival": "aggregates_each_arrival",
    "weighing": "default_aggregation_weights",
    "discounts": "discounts_staleness",
    "untrained_lr": "buffer_lr",
    "most_at_work": "max_concurrency",
    "foreseen_aggregations": "predict_num_aggregations",
    "timed_steps": "reference_steps",
    "periods": "contribution_periods",
    "streams": "aggregates_on_arrival",
    "by_weights": "uses_given_weights",
    "by_path": "divides_by_path",
    "records_shares": "logs_own_weights",
    "past_the_sum": "side_channel",
    "past_protection": "leaks_models",
    "unequal": "unequal_weights_reason",
    "of_one_round": "same_round_only",
    "counts_again": "reuses_last_update",
    "replies_beside": "extra_reply_bytes",
    "vectors": "client_vectors",
    "importance": "client_weights",
    "stopped": "should_stop",
    "keep": "save_model",
    "patience": "reply_timeouts",
    "parts": "stateful_components",
    "keeps_frozen": "cache_frozen_parameters",
    "reads_packed": "unpack_arrays",
    "compresses": "compress_updates",
}

CLASSES = {
    "Member": "ClientState",
    "EventsConfig": "AsyncConfigBase",
    "Played": "ParticipationEstimate",
    "Rules": "ClosingRules",
    "CallUp": "CohortSampler",
    "Early": "EarlyClosingState",
    "EarlyClosing": "DeadlineCollector",
    "WaitForAll": "AllReplies",
    "Outlook": "TaskEnd",
    "Loads": "TaskCosts",
    "KeptArrays": "FrozenParameterCache",
    "Gathered": "Aggregate",
    "Untrained": "BufferAverage",
    "InOnePass": "FusedSum",
    "Tally": "IntervalStatistics",
    "Mail": "MessageClient",
    "Wake": "Recheck",
    "Tick": "IntervalElapsed",
    "Look": "RefreshClients",
    "Turn": "AvailabilityChanged",
    "PatienceOver": "HoldExpired",
    "Held": "HeldReply",
    "Sent": "Dispatch",
    "Patience": "ReplyTimeouts",
    "Link": "UpdateTransform",
    "Local": "LocalModel",
    "Tell": "ModelCallback",
    "UnweighedError": "MissingWeightError",
    "Accounts": "ClientStatistics",
    "Parts": "TaskTiming",
}

# Keys of the run config, and the parts of a model's inputs, which is what the word means in the app.
KEPT = {
    ("strategies/core/config.py", "keep"),
    ("strategies/core/config.py", "patience"),
    ("fedapp/config/run_keys.py", "keep"),
    ("fedapp/config/run_keys.py", "patience"),
}
INPUT_PARTS = ("fedapp/data/", "fedapp/training/parts.py")


def defined(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the classes, functions, parameters and attributes that a module defines, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name, node.lineno
            for each in node.body:
                targets = each.targets if isinstance(each, ast.Assign) else [getattr(each, "target", None)]
                yield from ((target.id, each.lineno) for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def test_no_former_name_is_defined():
    terms, found = PUBLIC | CLASSES, []
    for path in sorted([*ROOT.glob("strategies/**/*.py"), *ROOT.glob("fedapp/**/*.py")]):
        file = path.relative_to(ROOT).as_posix()
        for name, line in defined(ast.parse(path.read_text("utf-8"))):
            plain = name.removeprefix("_")
            inputs = name == "parts" and file.startswith(INPUT_PARTS)
            if plain in terms and (file, name) not in KEPT and not inputs:
                found.append(f"{file}:{line}: {name}, now {terms[plain]}")
    assert not found, "\n".join(found)


def test_each_definition_is_found():
    text = "class Held:\n    keep: int = 0\n    def choose(self, *, parts): self._mail = 1\n"
    assert [name for name, _ in defined(ast.parse(text))] == [
        "Held",
        "keep",
        "choose",
        "self",
        "parts",
        "_mail",
    ]
