"""DiSF, the authors' form and the second moment, against an incremental greedy."""

from benchmarks.documents import KEEP, Documents, page_like, synthetic, web_pages
from benchmarks.measure import Row, above, against, in_turn
from dagster_datamask.selection.objectives import QualityDiversity
from dagster_datamask.selection.solve import Selection, solve

# {metric: the solver for it}
OURS = {"disf": "conditional_gradient", "disf_second_moment": "certified"}


def disf(full: bool) -> list[Row]:
    sizes = [1_000, 2_000, 5_000] if full else [1_000, 2_000]
    pages = web_pages()
    small = pages if pages is not None else synthetic(sizes[-1], 384)
    large = page_like(pages, 100_000) if pages is not None else synthetic(100_000, 384)
    rows = []
    for metric in OURS:
        rows += compare(small, metric, sizes, large)
    return rows


def find(documents: Documents, metric: str, solver: str) -> Selection:
    objective = QualityDiversity(documents.embeddings, None, 0.0, diversity={metric: 1.0})
    return solve(objective, round(KEEP * len(documents.ids)), solver=solver, ids=documents.ids)


def compare(documents: Documents, metric: str, sizes: list[int], large: Documents) -> list[Row]:
    """Values and the solvers' seconds at each size, and at the large one greedy's as the last size's times the square
    of how much larger it is: as many more choices, each among as many more documents."""
    rows = []
    for n in sizes:
        pool = documents.head(n)
        timed = in_turn(
            1,
            {
                "ours": lambda pool=pool: find(pool, metric, OURS[metric]),
                "greedy": lambda pool=pool: find(pool, metric, "greedy"),
            },
        )
        ours, greedy = timed["ours"].results[0], timed["greedy"].results[0]
        what = f"{metric}, {pool.name}:"
        rows += [
            above(f"{what} value", ours.value, greedy.value, slack=1e-12, facts={"gap": ours.certificate.gap}),
            against(f"{what} solver", ours.solver_seconds, greedy.solver_seconds, unit="s"),
        ]
    ours = find(large, metric, OURS[metric])
    extrapolated = greedy.solver_seconds * (len(large.ids) / sizes[-1]) ** 2
    facts = {"extrapolated": True, "from": sizes[-1], "value": ours.value, "seconds": ours.seconds}
    what = f"{metric}, {large.name}:"
    rows.append(
        against(f"{what} solver (greedy extrapolated)", ours.solver_seconds, extrapolated, unit="s", facts=facts)
    )
    if ours.certificate.gap is not None:
        rows.append(Row(f"{what} gap", ours.certificate.gap))
    return rows
