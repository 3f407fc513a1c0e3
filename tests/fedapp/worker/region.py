"""A region of three devices, given by its number, that answers on the worker's socket: what ``relay`` starts.

With sockets in place of a number its clients are the relays that answer there.
"""

import json
import os
import sys

from fedapp import client_app
from fedapp.config import RunConfig
from fedapp.engine.sequential import SequentialGrid
from fedapp.worker.asking import VARIABLE
from fedapp.worker.region import serve_region
from strategies.flower.grids import DEPLOYMENT, AddressedGrid
from strategies.testing import MemoryGrid

if __name__ == "__main__":
    # Safeguards bound sizes by those of the region.
    values = {
        "relay": os.environ.pop(VARIABLE),
        "safeguards": "off",
        **json.loads(os.environ.pop("KEYS", "{}")),
    }
    if sys.argv[1].isdecimal():
        region, grid = int(sys.argv[1]), SequentialGrid(client_app.app, 6)
        grid.engine = DEPLOYMENT
        clients = AddressedGrid(grid, range(3 * region + 1, 3 * region + 4))
    else:
        places = [
            {"partition-id": place, "num-partitions": 2, "relay": path}
            for place, path in enumerate(sys.argv[1:])
        ]
        clients = MemoryGrid(client_app.app, places)
        clients.engine, values["tiers"] = DEPLOYMENT, "relays"
    serve_region(clients, RunConfig.load(values))
