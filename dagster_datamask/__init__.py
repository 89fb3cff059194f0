"""Pre-training data selection as Dagster assets: DataMask with a certificate."""

__version__ = "0.1.0"
