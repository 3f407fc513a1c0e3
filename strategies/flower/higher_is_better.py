"""Whether a higher or a lower value of a metric is better, by the metric's name."""

# Metrics of which a lower value is better, beside losses and errors; all other metrics are scores.
_COSTS = frozenset({"error", "perplexity", "mae", "mse", "rmse", "mape"})

# Suffixes of the names of metrics that describe the spread over clients.
_SPREAD = ("-mean", "-worst-tenth", "-best")

# Prefix of the names of metrics of clients' personal models.
PERSONAL = "personal-"

# Prefixes of the names of per-client metrics, and of metrics of personal models.
_WHOSE = ("client-", PERSONAL)


def less_is_better(metric: str) -> bool:
    """Return True if a metric is a cost, by its name: a loss, an error, a deviation."""
    for ending in _SPREAD:
        metric = metric.removesuffix(ending)
    own = metric
    for beginning in _WHOSE:
        own = own.removeprefix(beginning)
    return own in _COSTS or own.endswith(("loss", "error", "-std"))
