"""GraftLossPlot: pictures of losses, of a constant and of Core's trainer; nothing to plot is said."""

import pytest


@pytest.mark.parametrize("losses", [[0.3, 0.2, 0.1], [0.5] * 4, [0.5], [0.0, 0.0]])
def test_losses_become_a_picture(host, losses):
    (picture,) = host.call("GraftLossPlot", loss={"loss": losses})
    assert picture.shape == (1, 540, 960, 3) and picture.min() >= 0 and picture.max() <= 1 and picture.std() > 0


def test_smoothing_changes_the_picture(host):
    losses = {"loss": [float(i % 3) for i in range(40)]}
    (raw,), (smooth,) = (host.call("GraftLossPlot", loss=losses, smoothing=s) for s in (0.0, 0.9))
    assert (raw != smooth).any()


@pytest.mark.parametrize("losses", [{"loss": []}, {}])
def test_an_empty_map_is_said(host, losses):
    with pytest.raises(ValueError, match="LOSS_MAP is empty"):
        host.call("GraftLossPlot", loss=losses)
