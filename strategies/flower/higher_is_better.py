"""Which way a metric is better, by its name."""

# Metrics of which less is better, beside losses and errors: all others are scores.
_COSTS = frozenset({"error", "perplexity", "mae", "mse", "rmse", "mape"})

# What stands behind a metric's name where it is one of its spread over clients.
_SPREAD = ("-mean", "-worst-tenth", "-best")

# How the names of metrics begin that clients' own models score, not the global one.
PERSONAL = "personal-"

# What stands before a metric's name where it is one of clients, or of their own models.
_WHOSE = ("client-", PERSONAL)


def less_is_better(metric: str) -> bool:
    """Tell whether a metric is a cost, by its name: a loss, an error, a deviation."""
    for ending in _SPREAD:
        metric = metric.removesuffix(ending)
    own = metric
    for beginning in _WHOSE:
        own = own.removeprefix(beginning)
    return own in _COSTS or own.endswith(("loss", "error", "-std"))
