"""Scores and embeddings of documents: fastText classifiers, transformers regression heads, sentence encoders.

Here belong: what turns text into a number or a vector under a published convention, how the models are found,
and how a user trains their own. Not here: reading and writing shards (`shards`), thresholds over a snapshot
and everything after the score (`selection`), settings and assets. No Dagster.
"""
