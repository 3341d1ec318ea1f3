import pytest

from pipeline.reports.run.communication import compression_chains, describe_compression, float32_bytes
from pipeline.reports.run.record import load_run_record
from pipeline.reports.run.sites import add_communication_section, add_participation_section, format_round_ranges
from tests.support.run_folder_factory import HOSTILE_NAME, make_round_record

CODEC = """
[compression]
uplink = [{ name = "topk", fraction = 0.05, error_feedback = true }, { name = "qsgd", bits = 8 }]
downlink = "fp16"
"""


@pytest.fixture
def render_page(render_section):
    def add_sections(writer, record, headline):
        add_participation_section(writer, record)
        add_communication_section(writer, record)

    return lambda run_folder: render_section(add_sections, run_folder)


def test_traffic_of_compressed_updates_against_float32(run_folder, render_page):
    # two sites, two rounds: 4 answers of 250,000 parameters are 4 MB; 4 MB went up and 8 MB down
    run_folder.results["num_parameters"] = 250_000
    run_folder.study_toml += CODEC
    for entry in run_folder.round_records:
        entry["bytes"]["up"] //= 4
    run_folder.results["traffic"]["up"] = 1_000_000
    page = render_page(run_folder)
    assert page.row("Uplink") == "Uplink (sites to coordinator) 1.0 MB 500.0 kB 4.0 MB 4.0 times less"
    assert page.row("Downlink") == "Downlink 8.0 MB 4.0 MB 4.0 MB 2.0 times more"
    assert any(
        text.startswith(
            "Uplink (updates): topk (only the largest 5 % of the numbers, with error feedback), then qsgd "
            "(rounded at random to 8 bits a number). Downlink (models): fp16 (half precision, two bytes a number)."
        )
        for text in page.texts("p")
    )


def test_float32_bytes_count_accepted_replies_and_requests(run_folder):
    run_folder.round_records[1]["accepted"] = ["a"]
    run_folder.results["num_parameters"] = 10
    record = load_run_record(run_folder.write())
    assert float32_bytes(record, "up") == 3 * 40
    assert float32_bytes(record, "down") == 4 * 40


def test_an_unfinished_run_lists_its_codecs_without_savings(run_folder, render_page):
    run_folder.study_toml += CODEC
    run_folder.results = None
    page = render_page(run_folder)
    assert any(text.startswith("Uplink (updates): topk") for text in page.texts("p"))
    assert "As float32" not in page.texts("th")


def test_a_negligible_saving(run_folder, render_page):
    run_folder.results["num_parameters"] = 245_000
    run_folder.study_toml += CODEC
    assert render_page(run_folder).row("Uplink").endswith("3.9 MB about as much")


@pytest.mark.parametrize("codec", ["", "[compression]\ndownlink = []\n"])
def test_without_compression_there_is_no_description(run_folder, render_page, codec):
    run_folder.study_toml += codec
    page = render_page(run_folder)
    assert "As float32" not in page.texts("th")
    assert "Uplink (updates)" not in page.texts("main")[0]


def test_default_codecs_of_a_strategy(run_folder):
    run_folder.study_toml = '[strategy]\nname = "fedpaq"\nbits = 1\n[compression]\ndownlink = []\n'
    run_folder.results["strategy"] = "fedpaq"
    text = describe_compression(compression_chains(load_run_record(run_folder.write())))
    assert (
        text == "Uplink (updates): qsgd (rounded at random to 1 bit a number). Downlink (models): uncompressed float32."
    )


@pytest.mark.parametrize("strategy", ['name = "gone"', 'name = "fedpaq"\nlevels = 3'])
def test_an_unknown_strategy_has_no_default_codecs(run_folder, strategy):
    run_folder.study_toml = f"[strategy]\n{strategy}\n[compression]\ndownlink = []\n"
    run_folder.results = None
    assert compression_chains(load_run_record(run_folder.write())) == {}


def test_an_unknown_codec_is_shown_by_name(run_folder):
    run_folder.study_toml += (
        '[compression]\nuplink = ["zip", { name = "randk", fraction = 0.5, error_feedback = false }]\n'
    )
    text = describe_compression(compression_chains(load_run_record(run_folder.write())))
    assert text.startswith("Uplink (updates): zip, then randk (50 % of the numbers, at random positions). ")


def test_quarantined_sites_by_round_and_reason(run_folder, render_page):
    run_folder.round_records = [
        make_round_record(round_number, {"a": 0.5, HOSTILE_NAME: 0.5}) for round_number in range(6)
    ]
    for round_number in (1, 2, 3, 5):
        run_folder.round_records[round_number]["failures"] = {
            "a": {
                "kind": "quarantined",
                "text": f"its update is {round_number}00 times as long as the median one; look at the site's data",
            }
        }
    run_folder.round_records[4]["failures"] = {
        "a": {"kind": "quarantined", "text": "delta is not finite"},
        HOSTILE_NAME: {"kind": "no_reply", "text": "quarantined: dropped out"},  # a text decides nothing
    }
    page = render_page(run_folder)
    rows = page.texts("tr")
    assert (
        "a 1–3, 5 its update is 100 times as long as the median one; look at the site's data "
        "in round 1; in the other rounds with different numbers"
    ) in rows
    assert "a 4 delta is not finite" in rows
    assert any(text.startswith("Quarantined updates: 1 site") for text in page.texts("caption"))


def test_a_dropout_is_not_quarantined(run_folder, render_page):
    run_folder.round_records[1]["failures"] = {"a": {"kind": "no_reply", "text": "dropped out"}}
    assert "Quarantined" not in render_page(run_folder).texts("main")[0]


def test_round_ranges():
    assert [format_round_ranges(turns) for turns in ([], [3], [7, 1, 2, 3], [1, 3])] == ["", "3", "1–3, 7", "1, 3"]
