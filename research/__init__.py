"""Bounds, problems with known minima, and the papers reproduced.

Imports the app, which knows nothing of it but the commands it adds; never shipped to devices.
"""
