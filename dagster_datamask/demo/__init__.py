"""Text for a first run on a machine that has nothing but the installed packages, and real rows where a hub is reached.

Here: choosing, cleaning and laying out the demo's documents, and the weak labels its demo classifiers learn from.
Not here: training, scoring, selection or anything Dagster; the demo runs the same graph as everyone else.
"""
