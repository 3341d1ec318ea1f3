"""Everything that left the sites in a run: who learns it, whom it is about, and what protects it, or "unprotected"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from models.probe.feature_names import MAX_FEATURES, QUALITY_MEASURES
from pipeline.protocol.tasks import CALIBRATION_BINS, SCORE_BINS, TEMPERATURES
from pipeline.reports.document.formatting import SPLIT_LABELS, join_names
from pipeline.study.schema import Study

Json = Mapping[str, Any]
DisclosureRow = dict[str, str]
UNPROTECTED = "unprotected"
PROTECTION_LABELS = {"dp": "differential privacy", "sum": "secure aggregation", "nobody": "nothing to protect"}


def list_disclosures(study: Study, facts: Json, results: Json) -> list[DisclosureRow]:
    """`key` names a kind; `protected_by` is dp, sum, nobody (it reveals nothing about a patient) or unprotected."""
    row_functions = (
        _update_rows,
        _training_rows,
        _cluster_rows,
        _score_rows,
        _profile_rows,
        _personalized_rows,
        _ledger_rows,
        _model_rows,
        _simulation_rows,
    )
    return [row for row_function in row_functions for row in row_function(study, facts, results)]


def _disclosure(
    key: str, content: str, recipient: str, subjects: str, protected_by: str, mechanism: str
) -> DisclosureRow:
    """`content`: a title, and after a colon its details."""
    title, _, detail = content.partition(": ")
    return {
        "key": key,
        "content": title,
        "detail": detail,
        "recipient": recipient,
        "subjects": subjects,
        "protected_by": protected_by,
        "protection_label": PROTECTION_LABELS.get(protected_by, protected_by),
        "mechanism": mechanism,
    }


def data_subjects(facts: Json) -> str:
    """The persons whose images they are, or the units of the data's coarsest key, in the plural."""
    person = facts["data_subject"]
    return f"{person['unit']}s" if person else "patients"


def privacy_unit_name(facts: Json) -> str:
    headline = facts["headline"]
    return "image" if headline and headline["unit"] == "example" else str(headline["unit"]) if headline else "site"


def format_range(values: list[float], digits: str = "#.3g") -> str:
    """One number if all are equal after rounding, else `low to high`."""
    low, high = (format(value, digits) for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def describe_mechanism(facts: Json) -> str:
    """DP-SGD in one sentence, with this run's numbers."""
    privacy_plans = [site_facts["privacy_plan"] for site_facts in facts["sites"].values() if site_facts["privacy_plan"]]
    unit, max_grad_norm = privacy_plans[0]["privacy_unit"], privacy_plans[0]["max_grad_norm"]
    noise_text = format_range([privacy_plan["noise_multiplier"] for privacy_plan in privacy_plans])
    rate_text = format_range([privacy_plan["sampling_rate"] for privacy_plan in privacy_plans])
    return (
        f"DP-SGD: in each step every {unit} is included with probability {rate_text}, its gradient is clipped to "
        f"{max_grad_norm:g}, and Gaussian noise of {noise_text} times this bound is added to the sum"
    )


def _update_rows(study: Study, facts: Json, results: Json) -> Iterator[DisclosureRow]:
    protection = facts["protection"]
    secure_aggregation = protection["secure_aggregation"]
    client_level_dp = protection["client_level_dp"]
    training_subjects = f"training {data_subjects(facts)}"
    visible_part = (
        "each site's update"
        if not secure_aggregation
        else f"the sum over at least {secure_aggregation['threshold']} sites"
    )
    recipient = f"the coordinator: {visible_part}; other sites: the models computed from them"
    masking_text = (
        f"secure aggregation among the {secure_aggregation['num_sampled_clients']} sites asked: single updates are hidden, their sum is not"
        if secure_aggregation
        else ""
    )
    stats_text = "" if protection["dp_sgd"] else ", and statistics of normalisation layers where there are any"
    content = f"Model updates: the change of every weight{stats_text}"
    if protection["dp_sgd"]:
        protected_by = "dp"
        protection_text = describe_mechanism(facts) + (f"; {masking_text}" if masking_text else "")
    else:
        protected_by = "sum" if secure_aggregation else UNPROTECTED
        protection_text = masking_text or UNPROTECTED
        if client_level_dp:
            protection_text = (
                f"against the coordinator: {protection_text}; against those who see only models: updates are clipped to "
                f"{client_level_dp['max_update_norm']:g}, and Gaussian noise of {client_level_dp['noise_multiplier']:.3g} times this bound is "
                "added to their sum"
            )
    yield _disclosure("update", content, recipient, training_subjects, protected_by, protection_text)


def _training_rows(study: Study, facts: Json, results: Json) -> Iterator[DisclosureRow]:
    protection, training_subjects = facts["protection"], f"training {data_subjects(facts)}"
    secure_aggregation = protection["secure_aggregation"]
    sends_weight = study.weighting != "equal"
    weight_text = "Number of training images, as the site's weight" if sends_weight else "Number of training images"
    if secure_aggregation:
        protection_text = "secure aggregation: only the sum over sites is visible" if sends_weight else "not sent"
        yield _disclosure("weight", weight_text, "the coordinator", training_subjects, "sum", protection_text)
    else:
        protection_text = f"{UNPROTECTED}; treated as public"
        yield _disclosure("weight", weight_text, "the coordinator", training_subjects, UNPROTECTED, protection_text)
        protection_text = f"{UNPROTECTED}; the training time of a site depends on how many images it sampled"
        yield _disclosure(
            "work",
            "Steps done and seconds of training",
            "the coordinator",
            training_subjects,
            UNPROTECTED,
            protection_text,
        )
    if not protection["dp_sgd"]:
        protected_by = "sum" if secure_aggregation else UNPROTECTED
        protection_text = (
            "secure aggregation: only the sum over sites is visible" if secure_aggregation else UNPROTECTED
        )
        yield _disclosure(
            "loss",
            "Mean training loss of a round",
            "the coordinator",
            training_subjects,
            protected_by,
            protection_text,
        )


def _cluster_rows(study: Study, facts: Json, results: Json) -> Iterator[DisclosureRow]:
    if study.strategy.visibility == "groups":
        content = "Which cluster's model fits the site's images best"
        training_subjects = f"training {data_subjects(facts)}"
        yield _disclosure("group", content, "the coordinator", training_subjects, UNPROTECTED, UNPROTECTED)


def _score_rows(study: Study, facts: Json, results: Json) -> Iterator[DisclosureRow]:
    if facts["study"]["evaluate_at"] == "coordinator":
        return
    site_data = facts["data"]["examples_by_site"]
    for split in dict.fromkeys([*facts["study"]["splits"], "test"]):
        sizes = [sum(counts.get(split) or ()) for counts in site_data.values()]
        if not any(sizes) or not (facts["released"] or split in facts["study"]["splits"]):
            continue
        frequency = "after every evaluated round" if split in facts["study"]["splits"] else "once, at the end"
        content = (
            f"Scores on {SPLIT_LABELS[split]} images, {frequency}: confusion matrix, loss, histograms of the scores in "
            f"{SCORE_BINS:,} bins, calibration counts in {CALIBRATION_BINS}"
        )
        few_images_text = f": a site has {format_range(list(map(float, sizes)), ',.0f')} images, so most occupied bins hold a single image"
        protection_text = UNPROTECTED + (few_images_text if max(sizes) < SCORE_BINS else "")
        yield _disclosure(
            f"scores/{split}",
            content,
            "the coordinator",
            f"{SPLIT_LABELS[split]} {data_subjects(facts)}",
            UNPROTECTED,
            protection_text,
        )


def _profile_rows(study: Study, facts: Json, results: Json) -> Iterator[DisclosureRow]:
    if not facts["study"]["profiled"] or facts["study"]["evaluate_at"] == "coordinator":
        return
    content = (
        f"A profile of the validation images, sent twice at the end: loss at {len(TEMPERATURES)} temperatures, sums and "
        f"products of at most {MAX_FEATURES} features, histograms of scores, distances and {len(QUALITY_MEASURES)} measures of "
        "the images"
    )
    recipient = "the coordinator; the totals of an exported model: anyone who receives its bundle"
    yield _disclosure("profile", content, recipient, f"validation {data_subjects(facts)}", UNPROTECTED, UNPROTECTED)


def _personalized_rows(study: Study, facts: Json, results: Json) -> Iterator[DisclosureRow]:
    strategy = study.strategy
    if not (strategy.personalized or strategy.result_in_client_states):
        return
    training_subjects = f"training {data_subjects(facts)}"
    protection_text = f"{UNPROTECTED}: what a site trains for itself may be trained without noise"
    content = "That the scores above are those of a model that the site adapted to its own images"
    if facts["study"]["evaluate_at"] != "coordinator":
        yield _disclosure("own", content, "the coordinator", training_subjects, UNPROTECTED, protection_text)
    content = "Each site's personalized model: it stays at the site; nothing is promised if it is given to anyone"
    yield _disclosure("own_model", content, "no one outside the site", training_subjects, UNPROTECTED, protection_text)


def _ledger_rows(study: Study, facts: Json, results: Json) -> Iterator[DisclosureRow]:
    reason = "nothing to protect: it follows from the study and from numbers treated as public"
    if facts["protection"]["dp_sgd"]:
        content = (
            "From the ledger: epsilon spent so far, hashes of the ledger's entries, its opening record with budget, privacy "
            "unit and keys, changes of keys"
        )
        yield _disclosure(
            "ledger", content, "the coordinator", "the site", "nobody", f"{reason}; the hashes are salted"
        )
        content = "That a site declines a round because its budget is spent"
        yield _disclosure("excuse", content, "the coordinator", "the site", "nobody", reason)
    content = "That the site exists, takes part, and when it answers"
    yield _disclosure("presence", content, "the coordinator and the other sites", "the site", UNPROTECTED, UNPROTECTED)


def _model_rows(study: Study, facts: Json, results: Json) -> Iterator[DisclosureRow]:
    protection, released_model = facts["protection"], facts["released"]
    protected_by = "dp"
    if protection["dp_sgd"]:
        protection_text = (
            f"computed only from noised updates: no further epsilon is spent on training {data_subjects(facts)}"
        )
    elif protection["client_level_dp"]:
        protection_text = "computed only from noised sums: no further epsilon is spent on the sites"
    else:
        protected_by = protection_text = UNPROTECTED
    content, training_subjects = "The models of all rounds", f"training {data_subjects(facts)}"
    yield _disclosure("model", content, "all sites", training_subjects, protected_by, protection_text)
    if released_model is not None:
        if released_model["selected_by"] != "last round":
            protection_text += f"; it depends on validation {data_subjects(facts)} only through the choice of its round, which is {UNPROTECTED}"
        content = f"The final model: of round {released_model['round']}, chosen by {released_model['selected_by']}"
        subjects = f"training and validation {data_subjects(facts)}"
        yield _disclosure("final", content, "anyone who receives it", subjects, protected_by, protection_text)


def _simulation_rows(study: Study, facts: Json, results: Json) -> Iterator[DisclosureRow]:
    all_subjects = f"all {data_subjects(facts)}"
    content = "The run folder of a simulation: class counts of each site, images of cells, the sites' folders and client states"
    recipient = "anyone who has the run folder"
    protection_text = f"{UNPROTECTED}: one machine simulates all sites; in hospitals these stay at the site"
    yield _disclosure("simulation", content, recipient, all_subjects, UNPROTECTED, protection_text)
    if baselines := results.get("baselines"):
        content = f"Baselines, trained for comparison, and their scores: {join_names(sorted(baselines))}"
        recipient, protection_text = "anyone who has access to this machine", f"{UNPROTECTED}; simulation only"
        yield _disclosure("baselines", content, recipient, all_subjects, UNPROTECTED, protection_text)
