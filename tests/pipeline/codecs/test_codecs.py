"""Codecs give back what they promise, in the bytes they promise, and refuse what they did not write."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.codecs.base import (
    REMAINDER_KEY,
    EncodedVector,
    VectorLayout,
    decode_vector,
    encode_vector,
    has_error_feedback,
)
from pipeline.codecs.fixed_point import FixedPointCodec, QuantizationGrid, decode_fixed_point, encode_fixed_point
from pipeline.codecs.fp16 import Fp16Codec
from pipeline.codecs.qsgd import Qsgd
from pipeline.codecs.randk import RandK
from pipeline.codecs.stochastic_rounding import CHUNK_SIZE
from pipeline.codecs.topk import TopK
from pipeline.core.errors import MessageError

PLAIN = VectorLayout()
CHAINS = {
    "qsgd1": (Qsgd(bits=1),),
    "qsgd2": (Qsgd(bits=2, per="whole"),),
    "qsgd4": (Qsgd(),),
    "qsgd8": (Qsgd(bits=8, block=5),),
    "qsgd of 3 levels": (Qsgd(levels=3, per="tensor", scale="norm"),),
    "fp16": (Fp16Codec(),),
    "topk": (TopK(fraction=0.1),),
    "randk": (RandK(fraction=0.1),),
    "ring": (FixedPointCodec(max_norm=1.0),),
    "topk, qsgd": (TopK(fraction=0.1), Qsgd(block=16)),
    "randk, fp16": (RandK(fraction=0.1, error_feedback=False), Fp16Codec()),
    "none": (),
}
chains = st.sampled_from(sorted(CHAINS)).map(CHAINS.get)
lengths = st.one_of(st.sampled_from([0, 1, 2, 3, 7, 8, 9, 255, 256, 257, 511, 512, 513]), st.integers(0, 700))
seeds = st.integers(0, 2**32)
cases = settings(max_examples=150, deadline=None)


def dice(seed=0):
    return torch.Generator().manual_seed(seed)


def vector(n, seed=0, size=1.0):
    """Normal numbers, some of them zero."""
    g = dice(seed)
    return (torch.randn(n, generator=g) * (torch.rand(n, generator=g) < 0.8)).mul_(size)


def there_and_back(chain, x, layout=PLAIN, seed=0):
    return decode_vector(chain, encode_vector(chain, x, layout, dice(seed)), layout)


def nbytes(packed):
    return sum(part.numel() * part.element_size() for part in packed.parts.values())


# ---- round trips ----


@cases
@given(chains, lengths, seeds)
def test_every_length_comes_back_finite_and_alike_for_the_same_dice(chain, n, seed):
    x = vector(n, seed)
    before = x.clone()
    one, two = (encode_vector(chain, x, PLAIN, dice(seed)) for _ in range(2))
    assert one.parts.keys() == two.parts.keys()
    assert all(torch.equal(one.parts[key], two.parts[key]) for key in one.parts)
    got = decode_vector(chain, one, PLAIN)
    assert got.shape == (n,)
    assert got.dtype == torch.float32
    assert torch.isfinite(got).all()
    assert torch.equal(x, before)


def rows_of(codec, x, layout):
    """The numbers that share a scale, the slow and plain way."""
    if codec.per == "block":
        return x.split(codec.block) if len(x) else ()
    return [row for row in x.split(layout.tensor_lengths(len(x)) if codec.per == "tensor" else [len(x)]) if len(row)]


def check_qsgd(codec, x, layout=PLAIN, seed=0):
    packed = encode_vector([codec], x, layout, dice(seed))
    got = decode_vector([codec], packed, layout)
    s = codec.levels or {1: 0.5, 2: 1, 4: 7, 8: 127}[codec.bits]
    rows = rows_of(codec, x, layout)
    assert nbytes(packed) == math.ceil(len(x) * codec.bits / 8) + 4 * len(rows)
    for row, back in zip(rows, rows_of(codec, got, layout), strict=True):
        scale = float(row.abs().max() if codec.scale == "max" else row.double().norm())
        assert float((back.double() - row).abs().max()) <= scale / s * (1 + 1e-6) + 1e-45
        if codec.bits == 1:
            assert torch.allclose(back.abs(), torch.tensor(scale), rtol=1e-6, atol=0)
        else:
            assert not back[row == 0].any()


settings_of_qsgd = st.builds(
    lambda width, per, block, scale: Qsgd(**width, per=per, block=block, scale=scale),
    st.one_of(
        st.sampled_from([1, 2, 4, 8]).map(lambda bits: {"bits": bits}),
        st.integers(1, 127).map(lambda s: {"levels": s}),
    ),
    st.sampled_from(["block", "tensor", "whole"]),
    st.sampled_from([1, 2, 3, 16, 256]),
    st.sampled_from(["max", "norm"]),
)


@cases
@given(settings_of_qsgd, lengths, seeds, st.integers(-46, 35))
def test_qsgd_is_within_one_level(codec, n, seed, magnitude):
    """From denormals and zeros up to 1e35; a tensor of no numbers has no scale."""
    layout = VectorLayout((n // 2, 0, min(n, 1), n - n // 2 - min(n, 1))) if n > 1 else PLAIN
    check_qsgd(codec, vector(n, seed, 10.0**magnitude), layout, seed)


@pytest.mark.parametrize(
    "codec", [Qsgd(), Qsgd(bits=1, block=1000), Qsgd(per="whole"), Qsgd(bits=8, block=CHUNK_SIZE + 1)]
)
@pytest.mark.parametrize("n", [CHUNK_SIZE - 1, CHUNK_SIZE, CHUNK_SIZE + 1, 2 * CHUNK_SIZE + 1003])
def test_qsgd_does_not_show_the_pieces_it_works_in(codec, n):
    x = vector(n)
    got = there_and_back([codec], x)
    scales = torch.cat([row.abs().max().expand(len(row)) for row in rows_of(codec, x, PLAIN)])
    assert ((got - x).abs() <= scales / {1: 0.5, 4: 7, 8: 127}[codec.bits] * (1 + 1e-6)).all()


def test_qsgd_survives_the_largest_floats():
    x = torch.full((600,), torch.finfo(torch.float32).max)
    x[::2] *= -1
    for bits in (1, 2, 4, 8):
        assert torch.equal(there_and_back([Qsgd(bits=bits)], x), x)
    with pytest.raises(MessageError, match="scale = 'max'"):
        encode_vector([Qsgd(scale="norm")], x, PLAIN, dice())


def test_qsgd_of_exact_levels_is_exact():
    x = torch.tensor([-7.0, -3.0, 0.0, 1.0, 5.0, 7.0, 2.0]) * 2.0**-10
    assert torch.allclose(there_and_back([Qsgd()], x), x, rtol=1e-6)


def test_levels_decide_the_bits():
    assert [Qsgd(levels=s).bits for s in (1, 2, 7, 8, 127)] == [2, 4, 4, 8, 8]
    codec = Qsgd(levels=100, block=64)
    assert Qsgd.model_validate(codec.model_dump()) == codec
    for wrong in ({"levels": 8, "bits": 4}, {"levels": 3, "bits": 8}, {"levels": 1, "bits": 1}, {"levels": 128}):
        with pytest.raises(ValidationError):
            Qsgd(**wrong)


@cases
@given(lengths, seeds, st.floats(-9, 4))
def test_fp16_is_the_nearest_half(n, seed, magnitude):
    x = vector(n, seed, 10**magnitude).clamp(-65504, 65504)
    assert torch.equal(there_and_back([Fp16Codec()], x), x.half().float())


@pytest.mark.parametrize("large", [65505.0, -65505.0, 1e38])
def test_fp16_refuses_what_it_cannot_hold(large):
    with pytest.raises(MessageError, match="qsgd"):
        encode_vector([Fp16Codec()], torch.tensor([0.0, large]), PLAIN, dice())


@cases
@given(lengths, seeds, st.sampled_from([1e-9, 0.01, 0.1, 0.3, 1.0]))
def test_topk_keeps_the_largest_as_they_are(n, seed, share):
    x = vector(n, seed)
    packed = encode_vector([TopK(fraction=share)], x, PLAIN, dice())
    index, got = packed.parts["0.topk.index"].long(), decode_vector([TopK(fraction=share)], packed, PLAIN)
    assert len(index) == (max(1, round(share * n)) if n else 0)
    assert torch.equal(got[index], x[index])
    dropped = torch.ones(n, dtype=torch.bool).index_fill_(0, index, False)
    assert not got[dropped].any()
    if 0 < len(index) < n:
        assert x[index].abs().min() >= x[dropped].abs().max()


@pytest.mark.parametrize("n", [100_000, 123_457])
@pytest.mark.parametrize("share", [1e-5, 0.01, 0.4])
@pytest.mark.parametrize("kind", ["normal", "zeros", "misleading"])
def test_topk_of_long_vectors_is_exact(n, share, kind):
    x = {"normal": vector(n), "zeros": torch.zeros(n), "misleading": torch.zeros(n)}[kind]
    if kind == "misleading":  # what the sample looks at is large, and nothing else is
        x[:: n // 10_000] = torch.arange(1, 1 + len(x[:: n // 10_000])).float()
    k = max(1, round(share * n))
    got = there_and_back([TopK(fraction=share)], x)
    assert torch.equal(got.abs().topk(k).values, x.abs().topk(k).values)
    assert int((got != 0).sum()) <= k


@cases
@given(lengths, seeds, st.sampled_from([1e-9, 0.01, 0.1, 0.3, 1.0]), st.booleans())
def test_randk_keeps_k_numbers_at_places_that_do_not_travel(n, seed, share, feedback):
    x = vector(n, seed).abs() + 1
    packed = encode_vector([RandK(fraction=share, error_feedback=feedback)], x, PLAIN, dice(seed))
    got = decode_vector([RandK(fraction=share, error_feedback=feedback)], packed, PLAIN)
    k = max(1, round(share * n)) if n else 0
    assert nbytes(packed) == 8 + 4 * k
    assert int((got != 0).sum()) == k
    factor = 1.0 if feedback or not n else n / k
    assert torch.equal(got[got != 0], (x * factor)[got != 0])


@pytest.mark.parametrize(("codec", "n", "expected"), [(Qsgd(), 1001, 501 + 16), (Qsgd(bits=1), 1001, 126 + 16)])
def test_codes_are_really_packed(codec, n, expected):
    assert nbytes(encode_vector([codec], vector(n), PLAIN, dice())) == expected


def test_a_chain_packs_what_the_first_stage_left():
    packed = encode_vector([TopK(fraction=0.1), Qsgd(block=64)], vector(1000), PLAIN, dice())
    assert nbytes(packed) == 100 * 4 + 50 + 2 * 4
    assert REMAINDER_KEY not in packed.parts


# ---- the ring ----


@cases
@given(lengths, seeds, st.floats(1e-3, 1e3), st.floats(1e-3, 1e3), st.integers(1, 1000))
def test_ring_rounds_and_clips(n, seed, clip, size, sites):
    x, codec = vector(n, seed, size), FixedPointCodec(max_norm=clip)
    got = there_and_back([codec], x, VectorLayout(num_clients=sites), seed).double()
    within = x.double() * min(1.0, clip / max(float(x.double().norm()), 1e-30))
    grid = QuantizationGrid(n, clip, sites)
    assert not n or float((got - within).abs().max()) <= grid.step_size * (1 + 1e-5)
    assert float(got.norm()) <= 1.1 * clip * (1 + 1e-5)
    assert grid.num_bits == math.ceil(math.log2(2 * sites * grid.num_levels + 1))


@cases
@given(lengths, seeds, st.integers(1, 12))
def test_sums_on_the_ring_are_sums_of_vectors(n, seed, sites):
    layout, codec, grid = (
        VectorLayout(num_clients=sites),
        FixedPointCodec(max_norm=2.0),
        QuantizationGrid(n, 2.0, sites),
    )
    xs = [vector(n, seed + i, 10.0) for i in range(sites)]  # longer than the clip
    sent = [encode_vector([codec], x, layout, dice(seed + i)) for i, x in enumerate(xs)]
    singles = sum(decode_vector([codec], one, layout).double() for one in sent)
    key = "0.ring.whole"
    total = sum(one.parts[key].long() for one in sent) % 2**grid.num_bits
    assert torch.allclose(decode_fixed_point(total, grid).double(), singles, atol=1e-5)
    wrapped = EncodedVector(n, {key: total.to(grid.dtype)})  # 40,000 is -25,536 as int16: the same on the ring
    assert torch.equal(decode_vector([codec], wrapped, layout), decode_fixed_point(total, grid))
    for x, one, i in zip(xs, sent, itertools.count()):
        assert torch.equal(encode_fixed_point(x, grid, dice(seed + i)), one.parts[key].long() % 2**grid.num_bits)


def test_the_worst_sum_does_not_overflow():
    """Ten sites that all send the clip in one number: 10 * levels of the ring."""
    grid, x = QuantizationGrid(1, 3.0, 10), torch.tensor([5.0])
    total = sum(encode_fixed_point(x, grid, dice(i)) for i in range(10)) % 2**grid.num_bits
    assert decode_fixed_point(total, grid).item() == pytest.approx(30.0)
    with pytest.raises(MessageError, match="10 sites"):
        decode_fixed_point(torch.tensor([10 * grid.num_levels + 1]), grid)


def test_ring_takes_the_smallest_integers_or_refuses():
    def kind(n, sites):
        return QuantizationGrid(n, 1.0, sites).dtype

    assert kind(1000, 100) == torch.int16
    assert kind(10_000, 100) == torch.int32
    assert QuantizationGrid(10_000, 1.0, 32).num_bits == 16
    with pytest.raises(MessageError, match="fewer sites"):
        kind(10**8, 10**6)


# ---- unbiased, and how noisy ----


def drift(draws, x):
    """How far the mean is from the vector, in standard errors, along the worst of many directions."""
    directions = torch.cat([torch.ones(1, len(x)), x.sign()[None], x[None], torch.randn(40, len(x), generator=dice())])
    along = (torch.stack(draws) - x).double() @ directions.double().T  # (draws, directions)
    return float((along.mean(0).abs() / (along.std(0) / math.sqrt(len(draws)) + 1e-9)).max())


UNBIASED = {
    "1 bit": Qsgd(bits=1),
    "1 bit, norm": Qsgd(bits=1, scale="norm"),
    "2 bits": Qsgd(bits=2),
    "4 bits": Qsgd(),
    "8 bits": Qsgd(bits=8),
    "3 levels, norm": Qsgd(levels=3, per="whole", scale="norm"),
    "randk": RandK(fraction=0.2, error_feedback=False),
    "ring": FixedPointCodec(max_norm=20.0),
}


@pytest.mark.parametrize("codec", UNBIASED.values(), ids=UNBIASED)
def test_the_mean_over_many_draws_is_the_vector(codec):
    x, g = vector(300, 5), dice(1)
    draws = [decode_vector([codec], encode_vector([codec], x, PLAIN, g), PLAIN) for _ in range(2000)]
    assert drift(draws, x) < 4.5


@pytest.mark.parametrize("shift", [0.0, 0.05])
def test_biased_rounding_would_be_noticed(shift):
    """To the nearest, and unbiased but for a twentieth of a step."""
    x, g = vector(300, 5), dice(1)
    step = float(x.abs().max()) / 7
    u = [torch.rand(300, generator=g) + shift if shift else 0.5 for _ in range(2000)]
    assert drift([(x / step + one).floor() * step for one in u], x) > 10


@pytest.mark.parametrize("s", [1, 3, 7, 127])
@pytest.mark.parametrize("n", [1, 10, 1000])
def test_the_variance_is_within_the_papers_bound(n, s):
    x, g, codec = vector(n, 3) + 0.01, dice(2), Qsgd(levels=s, per="whole", scale="norm")
    draws = [decode_vector([codec], encode_vector([codec], x, PLAIN, g), PLAIN) for _ in range(300)]
    noise = sum(float((q - x).double().square().sum()) for q in draws) / len(draws)
    assert noise <= min(n / s**2, math.sqrt(n) / s) * float(x.double().square().sum()) * 1.02 + 1e-9


def test_blocks_and_the_maximum_are_much_less_noisy_than_the_paper():
    x = vector(100_000)

    def noise(codec):
        return float((there_and_back([codec], x) - x).norm() / x.norm())

    assert noise(Qsgd()) < 0.2
    assert noise(Qsgd(scale="norm")) < 1.0
    assert noise(Qsgd(per="whole", scale="norm")) > 4


# ---- error feedback ----


@pytest.mark.parametrize("name", ["topk", "topk, qsgd", "randk"])
def test_what_is_lost_arrives_in_the_end(name):
    """The sum of what was decoded is T x - residual, and the residual does not grow with T."""
    chain, x = CHAINS[name], vector(300)
    assert has_error_feedback(chain)
    residual, arrived = torch.zeros(300), torch.zeros(300)
    distances = []
    for turn in range(200):
        y = x + residual
        got = there_and_back(chain, y, seed=turn)
        residual, arrived = y - got, arrived + got
        distances.append(float((arrived / (turn + 1) - x).norm() / x.norm()))
        assert torch.allclose(arrived + residual, (turn + 1) * x, atol=1e-3)
    assert distances[-1] < 0.1 < distances[0]


def test_feedback_can_be_switched_off():
    assert not has_error_feedback([TopK(error_feedback=False), Qsgd()])
    assert has_error_feedback([RandK(), Qsgd()])


# ---- refusals ----


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", CHAINS)
def test_what_is_not_finite_is_not_encoded(name, bad):
    for place in (0, 150, 299):
        x = vector(300)
        x[place] = bad
        with pytest.raises(MessageError, match="finite"):
            encode_vector(CHAINS[name], x, PLAIN, dice())


def edit(part, place, value):
    part = part.clone()
    part[place] = value
    return part


DAMAGE = {
    "negative scale": ("qsgd4", "0.qsgd.scales", lambda p: edit(p, 1, -1.0)),
    "scale that is no number": ("qsgd4", "0.qsgd.scales", lambda p: edit(p, 1, math.nan)),
    "infinite scale": ("qsgd4", "0.qsgd.scales", lambda p: edit(p, 0, math.inf)),
    "code beyond 4 bits": ("qsgd4", "0.qsgd.codes", lambda p: edit(p, 7, 0xF0)),
    "code beyond 2 bits": ("qsgd2", "0.qsgd.codes", lambda p: edit(p, 7, 0x03)),
    "code beyond 8 bits": ("qsgd8", "0.qsgd.codes", lambda p: edit(p, 7, 255)),
    "code beyond 3 levels": ("qsgd of 3 levels", "0.qsgd.codes", lambda p: edit(p, 7, 7)),
    "place before the start": ("topk", "0.topk.index", lambda p: edit(p, 0, -1)),
    "place beyond the end": ("topk", "0.topk.index", lambda p: edit(p, -1, 300)),
    "places out of order": ("topk", "0.topk.index", lambda p: p.flip(0)),
    "a place twice": ("topk", "0.topk.index", lambda p: edit(p, 1, int(p[0]))),
    "a value that is no number": ("topk", REMAINDER_KEY, lambda p: edit(p, 0, math.nan)),
    "an infinite half": ("fp16", "0.fp16.halves", lambda p: edit(p, 0, math.inf)),
    "a sum too large": ("ring", "0.ring.whole", lambda p: edit(p, 0, 255)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused(damage):
    name, key, harm = DAMAGE[damage]
    packed = encode_vector(CHAINS[name], vector(300), PLAIN, dice())
    with pytest.raises(MessageError):
        decode_vector(CHAINS[name], EncodedVector(packed.n, packed.parts | {key: harm(packed.parts[key])}), PLAIN)


TYPES = [torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64]
HARM = {
    "cut": lambda p, g: p[:-1],
    "emptied": lambda p, g: p[:0],
    "longer": lambda p, g: torch.cat([p, p, p.new_zeros(1)]),
    "another shape": lambda p, g: p[None],
    "a single number": lambda p, g: p.new_zeros(()),
    "another type": lambda p, g: p.to(TYPES[(TYPES.index(p.dtype) + 1) % len(TYPES)]),
}


@pytest.mark.parametrize("harm", [*HARM, "missing"])
@pytest.mark.parametrize("name", CHAINS)
def test_a_part_of_another_form_is_refused(name, harm):
    packed = encode_vector(CHAINS[name], vector(300), PLAIN, dice())
    for key, part in packed.parts.items():
        parts = {k: v for k, v in packed.parts.items() if k != key}
        if harm != "missing":
            parts[key] = HARM[harm](part, None)
        with pytest.raises(MessageError):
            decode_vector(CHAINS[name], EncodedVector(packed.n, parts), PLAIN)


@pytest.mark.parametrize("n", [-1, 0, 270, 557, 10**9, 2**31, 2**62, 10**400])
@pytest.mark.parametrize("name", CHAINS)
def test_a_wrong_length_is_refused_before_it_takes_memory(name, n):
    packed = encode_vector(CHAINS[name], vector(300), PLAIN, dice())
    with pytest.raises(MessageError):
        decode_vector(CHAINS[name], EncodedVector(n, packed.parts), PLAIN)


def noise_like(part, g):
    """The same form, with random bits."""
    raw = torch.randint(256, (part.numel() * part.element_size(),), generator=g).to(torch.uint8)
    return raw.view(part.dtype).view(part.shape)


@settings(max_examples=300, deadline=None)
@given(chains, st.integers(0, 600), st.integers(0, 600), st.data())
def test_whatever_arrives_is_decoded_or_refused(chain, n, claimed, data):
    """Any mixture of damage ends as n finite numbers or as BadMessage."""
    g = dice(data.draw(seeds))
    packed = encode_vector(chain, vector(n), PLAIN, g)
    harms = {**HARM, "noise": noise_like, "kept": lambda p, g: p}
    parts = {key: harms[data.draw(st.sampled_from(["kept", "noise", *HARM]))](p, g) for key, p in packed.parts.items()}
    for key in data.draw(st.sets(st.sampled_from(sorted(parts)), max_size=1)) if parts else ():
        del parts[key]
    length = data.draw(st.sampled_from([n, claimed]))
    try:
        got = decode_vector(chain, EncodedVector(length, parts), PLAIN)
    except MessageError:
        return
    assert got.shape == (length,)
    assert torch.isfinite(got).all()


def test_the_parts_of_another_codec_are_refused():
    for sender, receiver in itertools.permutations(CHAINS, 2):
        packed = encode_vector(CHAINS[sender], vector(300), PLAIN, dice())
        with pytest.raises(MessageError):
            decode_vector(CHAINS[receiver], packed, PLAIN)
