"""What is measured on one subject: predictions beside true increments, choices replayed, training that goes on.

Here: a subject to plain numbers that a file can hold. Not here: differences, intervals and verdicts (`estimates`).
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.influence_study.subjects import HELD_OUT, Documents, Subject
from dagster_datamask import keyed
from dagster_datamask.influence.bootstrap import bootstrap_trajectories
from dagster_datamask.influence.clusters import fit_clusters, relatedness
from dagster_datamask.influence.forward import Batch, NextToken
from dagster_datamask.influence.language_model import Checkpoint
from dagster_datamask.influence.pretraining import pretrain
from dagster_datamask.influence.reference import Reference
from dagster_datamask.influence.relational import (
    InfluenceModel,
    InfluenceOptions,
    fit,
    relational_influence,
    shuffled_context,
    sides,
)
from dagster_datamask.influence.rollouts import ProbeOptions, Prober, random_trajectories
from dagster_datamask.influence.selection import (
    budgets,
    greedy,
    gumbel_top_k,
    individual,
    individual_in_clusters,
    select_in_clusters,
)

Done = Callable[[int], None]

RANDOM, BOOTSTRAP = "random", "bootstrap"
TAU = 0.5
# trajectories that are rolled out between two words of progress
_TOGETHER = 40
_PLANTED_WIDTH = 3


@dataclass(frozen=True, eq=False)
class Rollouts:
    """trajectories int64[m, T], rows of documents; increments float64[m, T]; policies: one a trajectory."""

    trajectories: np.ndarray
    increments: np.ndarray
    policies: list[str]

    def __add__(self, other: "Rollouts") -> "Rollouts":
        return Rollouts(
            np.concatenate([self.trajectories, other.trajectories]),
            np.concatenate([self.increments, other.increments]),
            self.policies + other.policies,
        )

    def head(self, count: int) -> "Rollouts":
        return Rollouts(self.trajectories[:count], self.increments[:count], self.policies[:count])


def measure(subject: Subject, done: Done) -> dict[str, Any]:
    """All of one subject, as JSON values; done(n) is told of each n probes or training steps."""
    sizes = subject.sizes
    with Prober(subject.checkpoint, subject.reference, ProbeOptions(), processes=1) as prober:
        lab = Laboratory(subject, prober, done)
        training, validation = lab.learning(sizes.fitted(subject.seed))
        first = lab.fit(training.head(sizes.main - sizes.bootstrap) + validation.head(sizes.random_validation))
        tests, both = lab.both_policies(training, validation, first)
        count = sizes.main
        fitted = {
            "individual": lab.fit(training.head(count) + validation, mode="individual"),
            "cosine": lab.fit(training.head(count) + validation),
            "clamped": lab.fit(training.head(count) + validation, bracket="clamped"),
            "dot": lab.fit(training.head(count) + validation, bracket="clamped", similarity="dot"),
            "with bootstrap": lab.fit(both),
            "individual with bootstrap": lab.fit(both, mode="individual"),
        }
        for size in set(sizes.fitted(subject.seed)) - {count}:
            fitted[f"cosine {size}"] = lab.fit(training.head(size) + validation)
            fitted[f"individual {size}"] = lab.fit(training.head(size) + validation, mode="individual")
        predictions = {name: lab.predictions(tests, fitted) for name, tests in tests.items()}
        predictions[RANDOM]["predicted"]["shuffled"] = _listed(
            lab.shuffled(tests[RANDOM].trajectories, fitted["cosine"])
        )
        chosen = lab.chosen(fitted["cosine"], fitted["individual"], sizes.brute)
        single = prober.single_probes(subject.test.tokens, np.arange(sizes.drift))
        again = prober.single_probes(subject.test.tokens, np.arange(sizes.drift))
        done(2 * sizes.drift)
    with Prober(subject.later, subject.reference, ProbeOptions(), processes=1) as later:
        drifted = later.single_probes(subject.test.tokens, np.arange(sizes.drift))
        done(sizes.drift)
    return {
        "tests": predictions,
        "plain": plain(subject, done),
        "planted": lab.planted(tests[RANDOM], training.head(sizes.main) + validation),
        "chosen": chosen,
        "drift": {"first": _listed(single), "again": _listed(again), "later": _listed(drifted)},
        "continued": continued(subject, fitted["cosine"], fitted["individual"], done),
        "clusters": in_clusters(subject, fitted["cosine"]),
        "models": {name: {"alpha": model.alpha, "beta": model.beta} for name, model in fitted.items()},
        "language_model": {
            "parameters": subject.checkpoint.parameters,
            "losses": {
                "reference": [prober.base_loss, later.base_loss],
                "held_out": [document_losses(m, subject.held_out)[0] for m in (subject.checkpoint, subject.later)],
            },
        },
    }


class Laboratory:
    """A subject with a prober of its checkpoint."""

    def __init__(self, subject: Subject, prober: Prober, done: Done) -> None:
        self.subject, self.prober, self.done, self.sizes = subject, prober, done, subject.sizes
        held = sides(subject.probe.ids, subject.seed, HELD_OUT)
        self.train_rows, self.validation_rows = np.flatnonzero(~held), np.flatnonzero(held)

    def roll_out(self, documents: Documents, trajectories: np.ndarray, policy: str) -> Rollouts:
        parts = []
        for a in range(0, len(trajectories), _TOGETHER):
            part = trajectories[a : a + _TOGETHER]
            parts.append(self.prober.roll_out(documents.tokens, part, documents.ids).increments)
            self.done(part.size)
        return Rollouts(trajectories, np.concatenate(parts), [policy] * len(trajectories))

    def learning(self, counts: Sequence[int]) -> tuple[Rollouts, Rollouts]:
        """Random trajectories for training and for validation, each of their own documents."""
        drawn = []
        for rows, count in ((self.train_rows, max(counts)), (self.validation_rows, self.sizes.validation)):
            ids = [self.subject.probe.ids[i] for i in rows.tolist()]
            trajectories = rows[random_trajectories(ids, count, self.sizes.steps, self.subject.seed)]
            drawn.append(self.roll_out(self.subject.probe, trajectories, RANDOM))
        return drawn[0], drawn[1]

    def both_policies(
        self, training: Rollouts, validation: Rollouts, first: InfluenceModel
    ) -> tuple[dict[str, Rollouts], Rollouts]:
        """(test trajectories of each policy, what a model with bootstrap is fitted to)."""
        sizes, subject = self.sizes, self.subject
        # no two random test trajectories share a document
        trajectories = np.arange(len(subject.test)).reshape(sizes.test, sizes.steps)
        tests = {RANDOM: self.roll_out(subject.test, trajectories, RANDOM)}
        every = np.arange(len(subject.test))
        tests[BOOTSTRAP] = self.extremes(subject.test, every, first, sizes.test)
        rest = sizes.validation - sizes.random_validation
        both = (
            training.head(sizes.main - sizes.bootstrap)
            + self.extremes(subject.probe, self.train_rows, first, sizes.bootstrap)
            + validation.head(sizes.random_validation)
            + self.extremes(subject.probe, self.validation_rows, first, rest)
        )
        return tests, both

    def extremes(self, documents: Documents, rows: np.ndarray, model: InfluenceModel, count: int) -> Rollouts:
        part = documents.at(rows)
        h = model.embed(part.features)
        trajectories = bootstrap_trajectories(
            model.relation(h),
            model.influence(h),
            part.ids,
            count,
            self.sizes.steps,
            self.sizes.extreme,
            alpha=model.alpha,
            beta=model.beta,
            seed=self.subject.seed,
        )
        return self.roll_out(documents, rows[trajectories], BOOTSTRAP)

    def fit(self, rollouts: Rollouts, **options: Any) -> InfluenceModel:
        return self.fitted(rollouts.trajectories, rollouts.increments, **options)

    def fitted(self, trajectories: np.ndarray, increments: np.ndarray, **options: Any) -> InfluenceModel:
        chosen: InfluenceOptions = self.sizes.options(self.subject.seed, **options)
        probe = self.subject.probe
        return fit(probe.features, trajectories, increments, chosen, probe.ids, encoder=self.subject.encoder)[0]

    def predict(self, trajectories: np.ndarray, model: InfluenceModel) -> np.ndarray:
        h = model.embed(self.subject.test.features)
        return model.group_influence(h, model.influence(h), trajectories)

    def predictions(self, test: Rollouts, models: dict[str, InfluenceModel]) -> dict[str, Any]:
        predicted = {name: _listed(self.predict(test.trajectories, model)) for name, model in models.items()}
        return {"increments": _listed(test.increments), "predicted": predicted}

    def shuffled(self, trajectories: np.ndarray, model: InfluenceModel) -> np.ndarray:
        h = model.embed(self.subject.test.features)
        return shuffled_context(model, h, model.influence(h), trajectories, self.subject.seed)

    def planted(self, test: Rollouts, rollouts: Rollouts) -> dict[str, Any]:
        """Whether the fit finds a relation that is there: increments made by Eq. 13 itself with α = β = 1, and half as
        much noise. h is the first three principal components of the features, of unit length, so that it varies
        widely how much a document is like those before; f is about −1, so that it is that which matters."""
        subject = self.subject
        rng = keyed.rng(subject.seed, "study-planted", subject.name)
        centre = subject.probe.features.mean(axis=0, dtype=np.float64)
        apart = subject.probe.features - centre
        components = np.linalg.eigh(apart.T @ apart)[1][:, -_PLANTED_WIDTH:]
        head = rng.standard_normal(_PLANTED_WIDTH) / 4

        def law(documents: Documents, trajectories: np.ndarray) -> np.ndarray:
            h = (documents.features - centre) @ components
            h /= np.linalg.norm(h, axis=1, keepdims=True)
            made = relational_influence(h, h @ head - 1.0, trajectories, 1.0, 1.0)
            return made + made.std() / 2 * rng.standard_normal(made.shape)

        labels = law(subject.probe, rollouts.trajectories)
        truth = law(subject.test, test.trajectories)
        predicted = {}
        for mode in ("individual", "relational"):
            model = self.fitted(rollouts.trajectories, labels, mode=mode)
            predicted[mode] = _listed(self.predict(test.trajectories, model))
        return {"increments": _listed(truth), "predicted": predicted}

    def chosen(self, relational: InfluenceModel, single: InfluenceModel, brute: int) -> dict[str, Any]:
        """Sums of true increments of what is chosen out of pools that have no document in common."""
        sizes, pool = self.sizes, self.subject.pool
        rng = keyed.rng(self.subject.seed, "study-choose", self.subject.name)
        groups = rng.permutation(len(pool))[: sizes.pools * sizes.choose_from].reshape(sizes.pools, -1)
        n = sizes.choose
        picks: dict[str, list[np.ndarray]] = {"relational": [], "individual": [], "random": []}
        if brute:
            picks["one relation"] = []
        for rows in groups:
            part = pool.at(rows)
            h = relational.embed(part.features)
            vectors, f = relational.relation(h), relational.influence(h)
            alone = single.influence(single.embed(part.features))
            chosen = {
                "relational": greedy(vectors, f, n, alpha=relational.alpha, beta=relational.beta, ids=part.ids).rows,
                "individual": individual(alone, n, ids=part.ids).rows,
                "random": rng.permutation(len(part))[:n],
            }
            if brute:
                chosen["one relation"] = greedy(vectors, f, n, alpha=1.0, beta=1.0, ids=part.ids).rows
            for name, found in chosen.items():
                picks[name].append(rows[found])
        sums = {}
        for name, rows_of in picks.items():
            rolled = self.prober.roll_out(pool.tokens, np.array(rows_of), pool.ids)
            self.done(rolled.trajectories.size)
            sums[name] = _listed(rolled.cumulative[:, -1])
        forced = []
        for rows in groups[:brute]:
            part = pool.at(rows)
            best = self.prober.brute_force(part.tokens, n, part.ids)
            self.done(int(np.isfinite(best.influences).sum()))
            # what is chosen at the first step, all being measured at the same checkpoint
            lowest = individual(best.influences[0], n, ids=part.ids).rows
            replayed = self.prober.roll_out(part.tokens, lowest[None], part.ids)
            self.done(n)
            forced.append(
                {
                    "brute force": float(best.increments.sum()),
                    "oracle individual": float(replayed.cumulative[0, -1]),
                    "paths": {
                        "brute force": _listed(np.cumsum(best.increments)),
                        "oracle individual": _listed(replayed.cumulative[0]),
                    },
                    "overlap": {
                        str(k): len(set(lowest[:k].tolist()) & set(best.rows[:k].tolist())) / k for k in _doublings(n)
                    },
                }
            )
        return {"sums": sums, "forced": forced, "from": sizes.choose_from, "choose": n}


def plain(subject: Subject, done: Done) -> dict[str, Any]:
    """The same with β₁ = 0: a step is made of its own document's gradient alone."""
    sizes = subject.sizes
    with Prober(subject.checkpoint, subject.reference, ProbeOptions(beta1=0.0), processes=1) as prober:
        lab = Laboratory(subject, prober, done)
        training, validation = lab.learning((sizes.plain,))
        test = lab.roll_out(subject.test, np.arange(len(subject.test)).reshape(sizes.test, sizes.steps), RANDOM)
        fitted = {
            "individual": lab.fit(training + validation, mode="individual"),
            "cosine": lab.fit(training + validation),
        }
        return lab.predictions(test, fitted) | {
            "chosen": lab.chosen(fitted["cosine"], fitted["individual"], 0),
            "models": {name: {"alpha": model.alpha, "beta": model.beta} for name, model in fitted.items()},
        }


def continued(subject: Subject, relational: InfluenceModel, single: InfluenceModel, done: Done) -> dict[str, Any]:
    """Held-out reference losses, one a document, after training went on with what each way selects."""
    sizes, pool = subject.sizes, subject.pool
    n = round(sizes.share * len(pool))
    h = relational.embed(pool.features)
    vectors, f = relational.relation(h), relational.influence(h)
    alone = single.influence(single.embed(pool.features))
    alpha, beta = relational.alpha, relational.beta
    labels, _ = fit_clusters(vectors, sizes.clusters, ids=pool.ids, seed=subject.seed).assign(vectors)
    amounts = budgets(f, labels, n, ids=pool.ids, rule="proportional")
    picks = {
        "individual": individual(alone, n, ids=pool.ids).rows,
        "individual in clusters": individual_in_clusters(alone, labels, amounts, ids=pool.ids).rows,
        "group": select_in_clusters(vectors, f, labels, n, alpha=alpha, beta=beta, ids=pool.ids).rows,
        "group without clusters": greedy(vectors, f, n, alpha=alpha, beta=beta, ids=pool.ids).rows,
        "gumbel": gumbel_top_k(alone, n, tau=TAU, ids=pool.ids, seed=subject.seed).rows,
    }
    if subject.best is not None:
        picks["best"] = subject.best[:n]
    for k in range(sizes.draws):
        picks[f"random {k}"] = keyed.rng(subject.seed, "study-random", subject.name, k).permutation(len(pool))[:n]
    found = {}
    for name, rows in picks.items():
        went_on = pretrain(
            subject.checkpoint,
            # a set: the order of the choice is none of training
            pool.tokens[np.sort(rows)],
            sizes.training(subject.seed),
            until=sizes.warm_up + sizes.go_on,
            progress=lambda *_: done(1),
        ).checkpoint
        mean, losses = document_losses(went_on, subject.held_out)
        found[name] = {"loss": mean, "documents": _listed(losses)}
    overlap = {name: len(set(rows.tolist()) & set(picks["individual"].tolist())) / n for name, rows in picks.items()}
    return {"losses": found, "overlap with individual": overlap, "selected": n}


def in_clusters(subject: Subject, model: InfluenceModel) -> dict[str, Any]:
    """R inside clusters and across them, in the learned space, in the encoder's, and for a partition by lot."""
    pool, sizes = subject.pool, subject.sizes
    vectors = model.relation(model.embed(pool.features))
    found = {}
    for name, space in (("learned", vectors), ("encoder", pool.features)):
        labels, _ = fit_clusters(space, sizes.clusters, ids=pool.ids, seed=subject.seed).assign(space)
        found[name] = relatedness(space, labels)
        if name == "learned":
            lot = keyed.rng(subject.seed, "study-partition", subject.name).permutation(labels)
            found["partition"] = relatedness(space, lot)
    return {
        name: {
            "inside": [part.inside_mean, part.inside_sd],
            "across": [part.across_mean, part.across_sd],
        }
        for name, part in found.items()
    }


def document_losses(checkpoint: Checkpoint, reference: Reference) -> tuple[float, np.ndarray]:
    """(the mean loss over all tokens that count, float64[n] that of each row)."""
    following = NextToken(copy.deepcopy(checkpoint.model))
    batch = Batch(torch.from_numpy(reference.tokens.astype(np.int64)), torch.from_numpy(reference.mask.copy()))
    with torch.inference_mode():
        losses = following.losses(batch.tokens, batch.at, batch.targets).double().numpy()
    rows = batch.at.numpy() // reference.tokens.shape[1]
    counts = np.bincount(rows, minlength=len(reference.tokens))
    return float(losses.mean()), np.bincount(rows, losses) / counts


def _doublings(n: int) -> list[int]:
    return [2**k for k in range(n.bit_length()) if 2**k <= n]


def _listed(values: np.ndarray) -> list[Any]:
    """JSON values, null for NaN."""
    return np.where(np.isfinite(values), values, np.array(None)).tolist()
