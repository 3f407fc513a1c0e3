"""Modules of your own, which go with the app to wherever it runs: ``strategy = "custom.NAME:Class"``."""
