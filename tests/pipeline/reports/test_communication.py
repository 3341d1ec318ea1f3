import pytest

from pipeline.reports.run.communication import compression_chains, describe_compression, float32_bytes
from pipeline.reports.run.record import load_run_record
from pipeline.reports.run.sites import add_communication_section, add_participation_section, format_round_ranges

CODEC = """
[compression]
uplink = [{ name = "topk", fraction = 0.05, error_feedback = true }, { name = "qsgd", bits = 8 }]
downlink = "fp16"
"""


@pytest.fixture
def page_of(section_of):
    def both(sheet, record, lens):
        add_participation_section(sheet, record)
        add_communication_section(sheet, record)

    return lambda folder: section_of(both, folder)


def test_both_ways_in_words_and_against_float32(folder, page_of):
    # two sites, two rounds: 4 answers of 250,000 parameters are 4 MB; 4 MB went up and 8 MB down
    folder.results["parameters"] = 250_000
    folder.study += CODEC
    for entry in folder.rounds:
        entry["bytes"]["up"] //= 4
    folder.results["traffic"]["up"] = 1_000_000
    page = page_of(folder)
    assert page.row("Up, sites") == "Up, sites to coordinator 1.0 MB 500.0 kB 4.0 MB 4.0 times less"
    assert page.row("Down") == "Down 8.0 MB 4.0 MB 4.0 MB 2.0 times more"
    assert any(
        words.startswith(
            "Updates went up by topk (only the largest 5 % of the numbers, the rest waits for its turn), then qsgd "
            "(rounded at random to 8 bits a number); models came down by fp16 (half precision, two bytes a number)."
        )
        for words in page.texts("p")
    )


def test_only_answers_that_counted_are_counted(folder):
    folder.rounds[1]["counted"] = ["a"]
    folder.results["parameters"] = 10
    record = load_run_record(folder.write())
    assert float32_bytes(record, "up") == 3 * 40
    assert float32_bytes(record, "down") == 4 * 40


def test_a_run_that_goes_on_tells_its_codecs_without_a_ratio(folder, page_of):
    folder.study += CODEC
    folder.results = None
    page = page_of(folder)
    assert any(words.startswith("Updates went up by topk") for words in page.texts("p"))
    assert "As float32" not in page.texts("th")


def test_about_as_much_is_called_so(folder, page_of):
    folder.results["parameters"] = 245_000
    folder.study += CODEC
    assert page_of(folder).row("Up, sites").endswith("3.9 MB about as much")


@pytest.mark.parametrize("codec", ["", "[compression]\ndown = []\n"])
def test_without_codecs_nothing_is_said(folder, page_of, codec):
    folder.study += codec
    page = page_of(folder)
    assert "As float32" not in page.texts("th")
    assert "Updates went up" not in page.texts("main")[0]


def test_a_strategy_may_bring_its_own(folder):
    folder.study = '[strategy]\nname = "fedpaq"\nbits = 1\n[compression]\ndownlink = []\n'
    folder.results["strategy"] = "fedpaq"
    words = describe_compression(compression_chains(load_run_record(folder.write())))
    assert (
        words
        == "Updates went up by qsgd (rounded at random to 1 bit a number); models came down as they are, in float32."
    )


@pytest.mark.parametrize("strategy", ['name = "gone"', 'name = "fedpaq"\nlevels = 3'])
def test_a_strategy_that_is_no_longer_known_brings_none(folder, strategy):
    folder.study = f"[strategy]\n{strategy}\n[compression]\ndownlink = []\n"
    folder.results = None
    assert compression_chains(load_run_record(folder.write())) == {}


def test_an_unknown_codec_has_its_name(folder):
    folder.study += '[compression]\nup = ["zip", { name = "randk", share = 0.5, error_feedback = false }]\n'
    words = describe_compression(compression_chains(load_run_record(folder.write())))
    assert words.startswith("Updates went up by zip, then randk (50 % of the numbers, at random places); ")


def test_who_was_quarantined_when_and_why(folder, page_of, line, nasty):
    folder.rounds = [line(turn, {"a": 0.5, nasty: 0.5}) for turn in range(6)]
    for turn in (1, 2, 3, 5):
        folder.rounds[turn]["missed"] = {
            "a": f"quarantined: its update is {turn}00 times as long as the median one; look at the site's data"
        }
    folder.rounds[4]["missed"] = {"a": "quarantined: a: delta is not finite", nasty: "dropped out"}
    page = page_of(folder)
    rows = page.texts("tr")
    assert (
        "a 1–3, 5 its update is 100 times as long as the median one; look at the site's data "
        "as in round 1; in the others the same with other numbers"
    ) in rows
    assert "a 4 delta is not finite" in rows
    assert any(
        words.startswith("Quarantined: 1 site whose answers were not believed") for words in page.texts("caption")
    )


def test_who_only_dropped_out_was_not_quarantined(folder, page_of):
    folder.rounds[1]["missed"] = {"a": "dropped out"}
    assert "Quarantined" not in page_of(folder).texts("main")[0]


def test_ranges():
    assert [format_round_ranges(turns) for turns in ([], [3], [7, 1, 2, 3], [1, 3])] == ["", "3", "1–3, 7", "1, 3"]
