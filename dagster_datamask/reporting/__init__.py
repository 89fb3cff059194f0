"""Figures, tables and one self-contained page for people to read.

Here: numbers in, PNG bytes, Markdown, a terminal table or HTML out; equal inputs give equal bytes. Not here: computing
any of those numbers, reading shards, Dagster's metadata types.
"""
