"""A run read back. Import ``figures`` late: it loads matplotlib, which is slow."""

from fedapp.report.files import as_number, read_config, read_metrics

__all__ = ["as_number", "read_config", "read_metrics"]
