"""Secure aggregation: clients mask their updates, and the server learns their sum alone (Bell et al. 2020)."""
