"""Deployment on real devices: certificates, keys and start-up files, and all of it on loopback for a try."""
