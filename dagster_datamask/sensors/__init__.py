"""Sensors: what launches runs without a person."""
