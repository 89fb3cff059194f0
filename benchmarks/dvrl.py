"""DataMask's policy gradient, DVRL and the certified solver on one problem: the pattern of the paper's Table 8."""

from benchmarks.documents import KEEP, Documents, synthetic
from benchmarks.measure import Row, above, against
from dagster_datamask.selection.objectives import QualityDiversity
from dagster_datamask.selection.policy_gradient import PolicyGradientOptions
from dagster_datamask.selection.solve import Options, Selection, solve


def dvrl(full: bool) -> list[Row]:
    documents = synthetic(20_000)
    return [row for lam in (0.1, 0.5) for row in compare(documents, lam, PolicyGradientOptions(steps=1_500), None)]


def compare(documents: Documents, lam: float, masks: Options, network: Options | None) -> list[Row]:
    objective = QualityDiversity(documents.embeddings, documents.quality, lam, "per_pool")

    def find(solver: str, options: Options | None = None) -> Selection:
        return solve(objective, round(KEEP * len(documents.ids)), solver=solver, ids=documents.ids, options=options)

    best, learned, valued = find("certified"), find("policy_gradient", masks), find("dvrl", network)
    share = {s.solver: s.certificate.share for s in (best, learned, valued)}
    what = f"{documents.name}, λ = {lam:g}:"
    return [
        above(f"{what} value of policy gradient, DVRL", learned.value, valued.value, facts=share),
        above(f"{what} value of certified, policy gradient", best.value, learned.value),
        above(f"{what} value of certified, DVRL", best.value, valued.value),
        against(
            f"{what} seconds of policy gradient, DVRL", learned.solver_seconds, valued.solver_seconds, most=1, unit="s"
        ),
        against(f"{what} seconds of certified, DVRL", best.solver_seconds, valued.solver_seconds, unit="s"),
    ]
