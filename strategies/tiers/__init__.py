"""Tiers: a region with its devices is one client of the server above it."""
