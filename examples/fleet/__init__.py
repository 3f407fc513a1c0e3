"""Time to accuracy on a fleet of devices that differ in speed and come and go: ``python -m examples.fleet``."""
