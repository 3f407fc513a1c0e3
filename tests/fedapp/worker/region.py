"""A region of three devices, given by its number, that answers on the worker's socket: what ``relay`` starts."""

import os
import sys

from fedapp import client_app
from fedapp.config import RunConfig
from fedapp.engine.sequential import SequentialGrid
from fedapp.worker.asking import VARIABLE
from fedapp.worker.region import serve_region
from strategies.flower.grids import DEPLOYMENT, AddressedGrid

if __name__ == "__main__":
    region = int(sys.argv[1])
    grid = SequentialGrid(client_app.app, 6)
    grid.engine = DEPLOYMENT
    devices = AddressedGrid(grid, range(3 * region + 1, 3 * region + 4))
    # Safeguards bound sizes by those of the region.
    serve_region(devices, RunConfig.load({"relay": os.environ.pop(VARIABLE), "safeguards": "off"}))
