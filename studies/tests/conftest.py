"""What the studies' tests share with those of the project."""

from tests.conftest import (  # noqa: F401  (fixtures are found by their names)
    free_port,
    little_garbage,
    no_figures,
    own_environment,
    pytest_sessionfinish,
    repository,
    unused_ports,
)
