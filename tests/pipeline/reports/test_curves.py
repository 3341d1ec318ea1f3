import pytest

from pipeline.records.scores import RocPoints
from pipeline.reports.document.figure_style import INK_COLOR, save_png, to_svg
from pipeline.reports.run import curves as figures
from pipeline.reports.run import scores as score_figures
from pipeline.reports.run.curves import CurveSeries, band_edges, mean_over_sites

DIAGONAL = RocPoints(fpr=(0, 1), tpr=(0, 1))


def test_mean_and_standard_deviation_band_by_hand():
    # 0.2, 0.4, 0.6: mean 0.4, variance (0.04 + 0 + 0.04) / 3
    series = mean_over_sites("sites", {1: [0.2, 0.4, 0.6], 0: [0.5]})
    deviation = (0.08 / 3) ** 0.5
    assert series.rounds == [0, 1]
    assert series.values == pytest.approx([0.5, 0.4])
    assert series.std_over_sites == pytest.approx([0, deviation])
    low, high = band_edges(series, "68")
    assert (low[1], high[1]) == pytest.approx((0.4 - deviation, 0.4 + deviation))
    low, high = band_edges(series, "95")
    assert (low[1], high[1]) == pytest.approx((0.4 - 1.96 * deviation, 0.4 + 1.96 * deviation))


def test_the_width_of_the_plotted_band():
    figure = figures.plot_curves([CurveSeries("s", [0, 1], [0.5, 0.5], [0.1, 0.1])], "Accuracy", "95", percent=True)
    (band,) = figure.axes[0].collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == pytest.approx((50 - 19.6, 50 + 19.6))


def test_class_count_bars_are_stacked():
    figure = figures.plot_class_counts(["x", "y"], {"a": [3, 4], "b": [0, 5]})
    tops = [bar.get_y() + bar.get_height() for bar in figure.axes[0].patches]
    assert tops == [3, 0, 7, 5]  # class x at a and b, then y on top


def test_traffic_is_cumulative():
    figure = figures.plot_traffic([0, 1, 2], [0, 10**6, 10**6], [0, 3 * 10**6, 0])
    up, down = figure.axes[0].lines
    assert list(up.get_ydata()) == [0, 1, 2]
    assert list(down.get_ydata()) == [0, 3, 3]


def test_straggler_heatmap_distinguishes_not_sampled_partial_and_missing():
    figure = figures.plot_stragglers(["a", "b"], [1, 2], [[1.0, 0.5], [None, 0.2]], {(1, 1)})
    cells = figure.axes[0].images[0].get_array()
    alpha = cells[..., 3]
    assert alpha[1, 0] == 0
    assert alpha[0, 0] > alpha[0, 1] > 0
    assert tuple(cells[1, 1, :3]) != tuple(cells[0, 0, :3])


def test_many_rounds_share_columns():
    figure = figures.plot_stragglers(["a"], range(1, 1001), [[1.0] * 1000], {(0, 999)})
    assert figure.axes[0].images[0].get_array().shape[1] <= figures.MAX_HEATMAP_COLUMNS


@pytest.mark.parametrize("size", [2, 12])
def test_confusion_matrix_shows_every_count(size):
    counts = [[10 * row + column for column in range(size)] for row in range(size)]
    figure = score_figures.plot_confusion_matrix([f"class {at}" for at in range(size)], counts)
    written = [text.get_text().split("\n")[0] for text in figure.axes[0].texts]
    assert written == [str(count) for row in counts for count in row]


def test_an_empty_reliability_bin_is_not_plotted():
    figure = score_figures.plot_reliability([(0.5, 0.4, 10), (0.9, 0.0, 0)])
    assert len(figure.axes[0].collections[0].get_offsets()) == 1


def test_svg_uses_current_color_and_keeps_names():
    figure = figures.plot_class_counts(["x"], {f'stroke: {INK_COLOR} id="q" $a$': [1], "東京": [2]})
    svg = to_svg(figure, "one")
    assert svg.count(INK_COLOR) == 1  # the name's own
    assert "currentColor" in svg
    assert "東京" in svg
    assert "http" not in svg
    assert "font-family" not in svg


def test_two_figures_share_no_id():
    first, second = (to_svg(score_figures.plot_roc(DIAGONAL), key) for key in ("one", "two"))
    assert first != second
    assert first.replace("one-", "two-") == second


def test_png_has_the_right_size_and_no_metadata(tmp_path):
    figure = score_figures.plot_roc(DIAGONAL)
    content = save_png(figure, tmp_path / "deep" / "roc.png").read_bytes()
    assert int.from_bytes(content[16:20]) == round(5.2 * 150)
    assert b"tEXt" not in content
