"""What selection costs and what it is worth, beside its peers and bounds, with the bars that it is held to.

`python -m benchmarks.selection [--full] [--only NAME] [--out FILE]` prints a table a subject and ends in about 15
minutes on two quiet cores without --full. Ratios are of works timed in turn in one run: they carry over between
machines better than seconds do. docs/benchmarks.md tells how to read it. The file keeps every subject's latest run.
"""

from collections.abc import Callable

from benchmarks.certified import certified, pages
from benchmarks.disf import disf
from benchmarks.documents import KEEP, MINILM, Documents, synthetic, web_pages
from benchmarks.dvrl import dvrl
from benchmarks.facility import facility
from benchmarks.gradient import gradient
from benchmarks.measure import Row, product_seconds, run_subjects
from benchmarks.sharded import sharded

__all__ = ["KEEP", "MINILM", "SUBJECTS", "Documents", "product_seconds", "synthetic", "web_pages"]

SUBJECTS: dict[str, Callable[[bool], list[Row]]] = {
    "certified": certified,
    "pages": pages,
    "gradient": gradient,
    "facility": facility,
    "disf": disf,
    "dvrl": dvrl,
    "sharded": sharded,
}


if __name__ == "__main__":
    run_subjects("benchmarks.selection", __doc__, SUBJECTS)
