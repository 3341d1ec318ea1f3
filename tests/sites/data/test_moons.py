import torch

from sites.data.moons import TwoMoons


def test_two_moons_sizes_types_and_classes() -> None:
    data = TwoMoons().load(None, 3)
    assert data.x.shape == (840, 2)
    assert data.x.dtype == torch.float32
    assert [len(data.rows_in_split(s)) for s in ("train", "val", "test")] == [672, 0, 168]
    assert torch.bincount(data.y).tolist() == [420, 420]
    assert data.classes == ("upper", "lower")


def test_two_moons_upper_is_class_0() -> None:
    data = TwoMoons(noise=0).load(None, 0)
    assert data.x[data.y == 0, 1].min() >= 0
    assert data.x[data.y == 1, 1].max() <= 0.5


def test_two_moons_follow_the_seed() -> None:
    one, same, other = TwoMoons().load(None, 1), TwoMoons().load(None, 1), TwoMoons().load(None, 2)
    assert torch.equal(one.x, same.x)
    assert one.fingerprint == same.fingerprint != other.fingerprint


def test_two_moons_val_is_split_off_train() -> None:
    data = TwoMoons(points=100, val=0.25).load(None, 0)
    assert [len(data.rows_in_split(s)) for s in ("train", "val", "test")] == [60, 20, 20]
