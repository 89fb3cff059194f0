import math

from benchmarks.documents import synthetic
from benchmarks.group_selection import group_selection


def test_every_row_is_there_at_toy_size() -> None:
    rows = group_selection(synthetic(600, 16), clusters=(2, 30), picks=20)
    assert [row.what.split(": ", 1)[1].split(",")[0] for row in rows] == [
        "60 picks",
        "60 picks",
        "picks alone",
        "60 picks",
        "picks alone",
        "beside a sum of them",
        "beside their product with one vector by BLAS",
        "the same as with averages taken anew",
    ]
    assert "extrapolated from 20" in rows[0].what and rows[0].facts["picks"] == 20
    # differences of two clocks: at this size of any sign
    assert all(row.ours is not None and math.isfinite(row.ours) for row in rows)
    assert rows[-1].met is True
