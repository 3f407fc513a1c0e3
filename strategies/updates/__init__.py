"""From a reply to the next global model: checks, bounds, compression, sums, robust rules and server optimizers."""
