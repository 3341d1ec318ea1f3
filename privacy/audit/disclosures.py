"""Everything that left the sites in a run: who learns it, whom it is about, and what protects them, or "unprotected"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from models.probe.feature_names import MEASURES, TRAITS
from pipeline.protocol.tasks import CALIBRATION_BINS, SCORE_BINS, TEMPERATURES
from pipeline.reports.document.formatting import SPLITS, joined
from pipeline.study.schema import Study

Json = Mapping[str, Any]
Row = dict[str, str]
UNPROTECTED = "unprotected"


def disclosures(study: Study, facts: Json, results: Json) -> list[Row]:
    """`key` names a kind; `by` is dp, sum, nobody (says nothing of a patient) or unprotected."""
    parts = (_updates, _training, _groups, _scores, _profile, _own_scores, _ledger, _models, _simulation)
    return [row for part in parts for row in part(study, facts, results)]


def _row(key: str, what: str, whom: str, about: str, by: str, mechanism: str) -> Row:
    """`what` may have details after a colon."""
    title, _, detail = what.partition(": ")
    short = {"dp": "differential privacy", "sum": "secure sum", "nobody": "nothing to protect"}.get(by, by)
    return {"key": key, "what": title, "detail": detail, "whom": whom, "about": about, "by": by, "short": short,
            "mechanism": mechanism}  # fmt: skip


def people(facts: Json) -> str:
    """Whose images they are, in the plural."""
    person = facts["person"]
    return f"{person['unit']}s" if person else "patients"


def unit_of(facts: Json) -> str:
    lead = facts["headline"]
    return "image" if lead and lead["unit"] == "example" else str(lead["unit"]) if lead else "site"


def spread(values: list[float], digits: str = "#.3g") -> str:
    low, high = (format(value, digits) for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def mechanism(facts: Json) -> str:
    """DP-SGD in one sentence, with this run's numbers."""
    made = [found["promise"] for found in facts["sites"].values() if found["promise"]]
    unit = made[0]["unit"]
    noise, rate = (spread([p[part] for p in made]) for part in ("noise", "rate"))
    return (
        f"DP-SGD: in each step every {unit} takes part with chance {rate}, its gradient is clipped to {made[0]['clip']:g}, "
        f"and Gaussian noise of {noise} times that is added to the sum"
    )


def _updates(study: Study, facts: Json, results: Json) -> Iterator[Row]:
    how = facts["protection"]
    masked, noised, train = how["secure_sum"], how["at_coordinator"], f"training {people(facts)}"
    seen = "each site's own" if not masked else f"the sum over at least {masked['threshold']} sites"
    whom = f"the coordinator: {seen}; other sites: the models made from them"
    hidden = (
        f"secure sum: single updates are hidden, their sum is not, of {masked['asked']} sites asked" if masked else ""
    )
    stats = "" if how["at_site"] else ", and statistics of normalisation layers where there are any"
    what = f"Model updates: the change of every weight{stats}"
    if how["at_site"]:
        words = mechanism(facts) + (f"; {hidden}" if hidden else "")
        yield _row("update", what, whom, train, "dp", words)
    elif noised:
        words = (
            f"against the coordinator: {hidden or UNPROTECTED}; against all who see only models: clipped to "
            f"{noised['clip']:g}, Gaussian noise of {noised['noise']:.3g} times that on the sum"
        )
        yield _row("update", what, whom, train, "sum" if masked else UNPROTECTED, words)
    else:
        yield _row("update", what, whom, train, "sum" if masked else UNPROTECTED, hidden or UNPROTECTED)


def _training(study: Study, facts: Json, results: Json) -> Iterator[Row]:
    how, train = facts["protection"], f"training {people(facts)}"
    masked = how["secure_sum"]
    counted = study.weighting != "equal"
    size = "Number of training images, as the site's weight" if counted else "Number of training images"
    if masked:
        words = "secure sum: only their sum is seen" if counted else "not sent"
        yield _row("weight", size, "the coordinator", train, "sum", words)
    else:
        yield _row("weight", size, "the coordinator", train, UNPROTECTED, f"{UNPROTECTED}; treated as public")
        words = f"{UNPROTECTED}; how long a site takes depends on how many images it drew"
        yield _row("work", "Steps done and seconds taken", "the coordinator", train, UNPROTECTED, words)
    if not how["at_site"]:
        words = "secure sum: only its sum over sites is seen" if masked else UNPROTECTED
        yield _row("loss", "Mean training loss of a round", "the coordinator", train, "sum" if masked else UNPROTECTED, words)  # fmt: skip


def _groups(study: Study, facts: Json, results: Json) -> Iterator[Row]:
    if study.strategy.sees == "groups":
        what = "Which group's model fits the site's images best"
        yield _row("group", what, "the coordinator", f"training {people(facts)}", UNPROTECTED, UNPROTECTED)


def _scores(study: Study, facts: Json, results: Json) -> Iterator[Row]:
    if facts["study"]["judged_at"] == "coordinator":
        return
    held = facts["data"]["held"]
    for split in dict.fromkeys([*facts["study"]["watch"], "test"]):
        sizes = [sum(counts.get(split) or ()) for counts in held.values()]
        if not any(sizes) or not (facts["released"] or split in facts["study"]["watch"]):
            continue
        often = "after every round judged" if split in facts["study"]["watch"] else "once, at the end"
        what = (
            f"Scores on {SPLITS[split]} images, {often}: confusion matrix, loss, histograms of the scores in "
            f"{SCORE_BINS:,} bins, calibration counts in {CALIBRATION_BINS}"
        )
        few = f": a site has {spread(list(map(float, sizes)), ',.0f')} images, so that most bins hold single ones"
        words = UNPROTECTED + (few if max(sizes) < SCORE_BINS else "")
        yield _row(f"scores/{split}", what, "the coordinator", f"{SPLITS[split]} {people(facts)}", UNPROTECTED, words)


def _profile(study: Study, facts: Json, results: Json) -> Iterator[Row]:
    if not facts["study"]["profiled"] or facts["study"]["judged_at"] == "coordinator":
        return
    what = (
        f"A profile of validation images, twice at the end: loss at {len(TEMPERATURES)} temperatures, sums and products of at most "
        f"{TRAITS} features, histograms of scores, distances and {len(MEASURES)} measures of the images"
    )
    whom = "the coordinator; of an exported model's totals, whoever is given its bundle"
    yield _row("profile", what, whom, f"validation {people(facts)}", UNPROTECTED, UNPROTECTED)


def _own_scores(study: Study, facts: Json, results: Json) -> Iterator[Row]:
    strategy = study.strategy
    if not (strategy.personalised or strategy.remembers):
        return
    train = f"training {people(facts)}"
    words = f"{UNPROTECTED}: what a site trains for itself may be trained without noise"
    what = "That the scores above are those of a model which the site adapted to its own images"
    if facts["study"]["judged_at"] != "coordinator":
        yield _row("own", what, "the coordinator", train, UNPROTECTED, words)
    what = "Each site's own model: it stays at the site; whoever is given it is promised nothing"
    yield _row("own_model", what, "nobody outside the site", train, UNPROTECTED, words)


def _ledger(study: Study, facts: Json, results: Json) -> Iterator[Row]:
    nothing = "nothing to protect: it follows from the study and from numbers treated as public"
    if facts["protection"]["at_site"]:
        what = "From the ledger: epsilon spent so far, hashes of the ledger's entries, its opening with budget, unit and keys, changes of keys"
        yield _row("ledger", what, "the coordinator", "the site", "nobody", f"{nothing}; the hashes are salted")
        what = "That a site sits a round out because its budget is spent"
        yield _row("excuse", what, "the coordinator", "the site", "nobody", nothing)
    what = "That the site exists, takes part, and when it answers"
    yield _row("presence", what, "the coordinator and the other sites", "the site", UNPROTECTED, UNPROTECTED)


def _models(study: Study, facts: Json, results: Json) -> Iterator[Row]:
    how, made = facts["protection"], facts["released"]
    if how["at_site"]:
        by, words = "dp", f"made from noised updates alone: no more is spent on training {people(facts)}"
    elif how["at_coordinator"]:
        by, words = "dp", "made from noised sums alone: no more is spent on the sites"
    else:
        by, words = UNPROTECTED, UNPROTECTED
    yield _row("model", "The models of all rounds", "all sites", f"training {people(facts)}", by, words)
    if made is not None:
        chosen = made["chosen_by"] != "last round"
        words += f"; on validation {people(facts)} it depends only through the choice of its round, which is {UNPROTECTED}" if chosen else ""  # fmt: skip
        what = f"The final model: of round {made['round']}, chosen by {made['chosen_by']}"
        yield _row("final", what, "whoever is given it", f"training and validation {people(facts)}", by, words)


def _simulation(study: Study, facts: Json, results: Json) -> Iterator[Row]:
    everybody = f"all {people(facts)}"
    what = (
        "The run folder of a simulation: counts by class of each site, pictures of cells, sites' folders and memories"
    )
    words = f"{UNPROTECTED}: one machine plays all sites; in hospitals these stay at the site"
    yield _row("simulation", what, "whoever has the run folder", everybody, UNPROTECTED, words)
    if yards := results.get("yardsticks"):
        what = f"Models trained for comparison, and their scores: {joined(sorted(yards))}"
        yield _row(
            "yardsticks", what, "whoever has this machine", everybody, UNPROTECTED, f"{UNPROTECTED}; simulation only"
        )
