"""Study files: parsing, overrides, hashes, learning-rate schedules, and errors that name key, line and valid choices."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.errors import StudyError
from pipeline.study.schema import LocalConfig
from pipeline.study.toml_file import PACKAGED_STUDIES, find_study, load_study, parse_override, parse_study, to_toml

STUDY = """name = "s"
[data]
name = "moons"
[sites]
count = 3
[model]
name = "moons_net"
[local]
lr = 0.1
[strategy]
name = "fedprox"
mu = 0.5
"""


def parse_error(text: str, **overrides) -> str:
    with pytest.raises(StudyError) as error:
        parse_study(text, "s.toml", overrides)
    return str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "want"),
    [
        ("lr = 0.1", "lrr = 0.1", ["s.toml:9", "'local.lrr'", "did you mean 'lr'", "momentum"]),
        ("lr = 0.1", "lr = -1", ["s.toml:9", "local.lr", "greater than 0", "-1"]),
        ("mu = 0.5", "muu = 0.5", ["s.toml:12", "'strategy.muu'", "did you mean 'mu'", "gamma"]),
        ("mu = 0.5", "mu = -0.5", ["s.toml:12", "strategy.mu"]),
        ('"fedprox"', '"fedproxx"', ["s.toml:10", "'fedproxx' is not known", "did you mean 'fedprox'", "fedavg"]),
        ('name = "s"', 'name = "s"\nrouns = 3', ["s.toml:2", "'rouns'", "did you mean 'rounds'"]),
        ('name = "moons"', 'name = "moon"', ["s.toml:2", "did you mean 'moons'", "fashion_mnist"]),
        ('[model]\nname = "moons_net"', "", ["'model' is missing", "cnn28"]),
        ("count = 3", "count = 0", ["s.toml:5", "sites.count"]),
        ("[local]\nlr = 0.1", "[local]\nepochs = 2\nsteps = 5", ["s.toml:8", "either epochs or steps"]),
        (
            "[local]",
            '[evaluation]\nselection_metric = "acuracy"\n[local]',
            ["s.toml:9", "evaluation.selection_metric", "'accuracy'", "'auroc'"],
        ),
        (
            "[local]",
            "[local]\nbatch_size = 0",
            ["s.toml:9: local.batch_size", "greater than 0 or", "'all'", "(given: 0)"],
        ),
        ("count = 3", "count = 3\nspeed = [1.0, -1.0]", ["s.toml:6: sites.speed"]),
        ('name = "s"', 'name = "../s"', ["s.toml:1", "name"]),
        ("[local]", "[local", ["not valid TOML", "line 8"]),
    ],
)
def test_study_errors_name_key_line_and_choices(old, new, want):
    text = parse_error(STUDY.replace(old, new, 1))
    for part in want:
        assert part in text, text


def test_override_errors_name_the_override():
    assert parse_error(STUDY, **{"local.lr": "fast"}).startswith("--set local.lr: should be a valid number")
    assert parse_error(STUDY, **{"local.speed": 1}).startswith("--set local.speed: unknown key")


def test_overrides_change_sections_and_components():
    study = parse_study(STUDY, "s", {"local.lr": 0.3, "strategy.name": "fedavg", "sites.count": 5})
    assert (study.local.lr, study.strategy.name, study.sites.count) == (0.3, "fedavg", 5)
    assert parse_study(STUDY, "s", {"strategy": "fedsgd"}).strategy.name == "fedsgd"
    assert parse_study(STUDY, "s", {"strategy.mu": 0}).strategy.mu == 0


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("a.b=3", ("a.b", 3)),
        ("a=x y", ("a", "x y")),
        ("a=[1, 2]", ("a", [1, 2])),
        ("a=true", ("a", True)),
        ("a=x=y", ("a", "x=y")),
    ],
)
def test_override_values_are_toml_or_strings(text, want):
    assert parse_override(text) == want


def test_override_needs_an_equals_sign():
    with pytest.raises(StudyError, match=r"--set local\.lr=0\.1"):
        parse_override("local.lr")


@given(
    st.dictionaries(
        st.from_regex(r"[a-z]{1,8}", fullmatch=True),
        st.one_of(
            st.integers(),
            st.text(),
            st.booleans(),
            st.lists(st.integers()),
            st.floats(allow_nan=False, allow_infinity=False),
        ),
    )
)
def test_to_toml_round_trip(values):
    assert tomllib.loads(to_toml({"v": 1} | {"t": values}))["t"] == values


def test_resolved_study_is_the_same_study():
    study = parse_study(STUDY, "s", {})
    again = parse_study(to_toml(study.to_dict()), "t", {})
    assert again == study
    assert again.hash == study.hash


def test_study_hash_ignores_name_description_and_data_path():
    study = parse_study(STUDY, "s", {})
    same = parse_study(STUDY, "s", {"name": "other", "description": "x", "data.path": "/elsewhere"})
    assert same.hash == study.hash
    assert parse_study(STUDY, "s", {"seed": 1}).hash != study.hash


@pytest.mark.parametrize("path", sorted(PACKAGED_STUDIES.glob("*.toml")), ids=lambda p: p.stem)
def test_packaged_studies_are_valid(path: Path):
    assert load_study(path).name == path.stem
    assert load_study(path).description


def test_unknown_study_lists_the_packaged_studies():
    with pytest.raises(StudyError, match="moons-demo"):
        find_study("moons-demos")


def test_lr_schedules_by_hand():
    assert [
        LocalConfig(lr=1, lr_schedule="step", lr_decay=0.5, lr_decay_every=2).lr_at_round(t, 6) for t in range(1, 6)
    ] == [1, 1, 0.5, 0.5, 0.25]
    assert LocalConfig(lr=1, lr_schedule="exponential", lr_decay=0.5).lr_at_round(3, 6) == 0.25
    cosine = [LocalConfig(lr=2, lr_schedule="cosine").lr_at_round(t, 4) for t in (1, 3)]
    assert cosine == pytest.approx([2.0, 1.0])


def test_typo_in_public_data_suggests_its_keys(tmp_path):
    file = tmp_path / "s.toml"
    file.write_text(
        'name = "x"\ndata = "moons"\nmodel = "moons_net"\n[public.data]\nname = "synthetic_smear"\ntaks = "types"\n'
    )
    with pytest.raises(StudyError, match=r"s\.toml:6: unknown key 'public\.data\.taks'; did you mean 'task'\?"):
        load_study(file)


def test_data_path_in_an_override_starts_at_the_working_directory(tmp_path, monkeypatch):
    file = tmp_path / "s.toml"
    file.write_text('name = "x"\ndata = "moons"\nmodel = "moons_net"\n[public.data]\nname = "folder"\npath = "a"\n')
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    assert load_study(file).public.data.path == tmp_path / "a"
    assert load_study(file, {"public.data.path": "b"}).public.data.path == tmp_path / "sub" / "b"


def test_typo_in_dp_sgd_suggests_its_keys(tmp_path):
    with pytest.raises(StudyError, match="did you mean 'epsilon'"):
        load_study(find_study("smear-private"), {"privacy.dp_sgd.epsilonn": 2.0})
