"""A dashboard for Grafana of what a run tells Prometheus (fedapp/server/exporter.py), in Grafana's JSON model."""

import json
from typing import Any

_SOURCE = {"type": "prometheus", "uid": "${source}"}
_WIDTH, _HEIGHT = 24, 8  # columns of Grafana's grid, and rows of a panel

# Title, kind of panel, unit, width, and expressions with their legends; $run is the address that Prometheus asks.
_RUN = 'instance=~"$run"'
_PANELS: tuple[tuple[str, str, str, int, tuple[tuple[str, str], ...]], ...] = (
    (
        "Progress",
        "gauge",
        "percentunit",
        6,
        ((f"fedapp_aggregations{{{_RUN}}} / fedapp_aggregations_planned{{{_RUN}}}", "{{instance}}"),),
    ),
    (
        "Devices",
        "stat",
        "none",
        6,
        (
            (f"fedapp_clients_connected{{{_RUN}}}", "connected"),
            (f"fedapp_clients_at_work{{{_RUN}}}", "at work"),
        ),
    ),
    ("Time since the run began", "stat", "s", 6, ((f"fedapp_run_seconds{{{_RUN}}}", "{{instance}}"),)),
    (
        "Run",
        "stat",
        "none",
        6,
        ((f"fedapp_run{{{_RUN}}}", "{{run}}, {{strategy}}, {{engine}}"),),
    ),
    (
        "Numbers of metrics.jsonl",
        "timeseries",
        "none",
        12,
        ((f'fedapp_number{{{_RUN},name=~"$number"}}', "{{name}}"),),
    ),
    (
        "Seconds from one aggregation to the next",
        "timeseries",
        "s",
        12,
        (
            (
                f"rate(fedapp_aggregation_seconds_sum{{{_RUN}}}[$__rate_interval]) / "
                f"rate(fedapp_aggregation_seconds_count{{{_RUN}}}[$__rate_interval])",
                "{{instance}}",
            ),
        ),
    ),
    (
        "Tasks by outcome",
        "timeseries",
        "none",
        12,
        (
            (f"increase(fedapp_updates_total{{{_RUN}}}[$__rate_interval])", "{{outcome}}"),
            (f"increase(fedapp_updates_clipped_total{{{_RUN}}}[$__rate_interval])", "shortened"),
        ),
    ),
    (
        "Bytes",
        "timeseries",
        "Bps",
        12,
        ((f"rate(fedapp_bytes_total{{{_RUN}}}[$__rate_interval])", "{{direction}}"),),
    ),
    (
        "Tasks of each device that didn't count",
        "timeseries",
        "none",
        12,
        (
            (
                f'fedapp_client_updates_total{{{_RUN},outcome!="accepted"}}',
                "{{client}} {{device}}: {{outcome}}",
            ),
        ),
    ),
    (
        "Tasks of each device that counted",
        "timeseries",
        "none",
        12,
        ((f'fedapp_client_updates_total{{{_RUN},outcome="accepted"}}', "{{client}} {{device}}"),),
    ),
    (
        "At work",
        "state-timeline",
        "none",
        12,
        ((f"fedapp_client_at_work{{{_RUN}}}", "{{client}} {{device}}"),),
    ),
    (
        "Seconds of a task, by device",
        "timeseries",
        "s",
        12,
        ((f"fedapp_client_task_seconds{{{_RUN}}}", "{{client}} {{device}}"),),
    ),
    (
        "What a device counts in the objective, p_i",
        "bargauge",
        "none",
        12,
        ((f"fedapp_client_importance{{{_RUN}}}", "{{client}} {{device}}"),),
    ),
    (
        "What an update of a device counts, d_i",
        "timeseries",
        "none",
        12,
        ((f"fedapp_client_weight{{{_RUN}}}", "{{client}} {{device}}"),),
    ),
)


def dashboard() -> str:
    """Return the dashboard as JSON, to be imported into Grafana; it asks which Prometheus it reads."""
    panels, x, y = [], 0, 0
    for number, (title, kind, unit, width, targets) in enumerate(_PANELS, 1):
        if x + width > _WIDTH:
            x, y = 0, y + _HEIGHT
        panels.append(
            {
                "id": number,
                "title": title,
                "type": kind,
                "datasource": _SOURCE,
                "gridPos": {"x": x, "y": y, "w": width, "h": _HEIGHT},
                "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
                "targets": [
                    {
                        "refId": chr(ord("A") + place),
                        "datasource": _SOURCE,
                        "expr": expression,
                        "legendFormat": legend,
                    }
                    for place, (expression, legend) in enumerate(targets)
                ],
            }
        )
        x += width
    content = {
        "uid": "fedapp",
        "title": "fedapp",
        "tags": ["flower"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": panels,
    }
    return json.dumps(content, indent=2) + "\n"


def _variables() -> list[dict[str, Any]]:
    return [
        {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        _values_of("run", "label_values(fedapp_run, instance)"),
        _values_of("number", 'label_values(fedapp_number{instance=~"$run"}, name)'),
    ]


def _values_of(name: str, query: str) -> dict[str, Any]:
    every = {"text": "All", "value": "$__all"}
    return {
        "name": name,
        "type": "query",
        "datasource": _SOURCE,
        "query": query,
        "refresh": 2,  # whenever the dashboard's time changes
        "includeAll": True,
        "multi": True,
        "current": every,
    }
