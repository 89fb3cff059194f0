"""What embedding and scoring cost beside the plain libraries, with the bars that they are held to.

`python -m benchmarks.scoring [--full] [--only NAME] [--out FILE]` prints a table a subject, in a few minutes without
--full. Ratios are of works timed in turn in one run. docs/benchmarks.md tells how to read it. The file keeps every
subject's latest run.
"""

from benchmarks import embedding, scorers, substrings
from benchmarks.measure import run_subjects

SUBJECTS = embedding.SUBJECTS | scorers.SUBJECTS | substrings.SUBJECTS

if __name__ == "__main__":
    run_subjects("benchmarks.scoring", __doc__, SUBJECTS)
