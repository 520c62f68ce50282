"""A stand-in for the package `lpips`, with its signatures: a fixed convolution in place of VGG."""

import sys
import types

import torch


class LPIPS(torch.nn.Module):
    """Takes what `lpips.LPIPS` of version 0.1.4 takes; pictures in -1..1, distances (N, 1, 1, 1)."""

    def __init__(
        self,
        pretrained=True,
        net="alex",
        version="0.1",
        lpips=True,
        spatial=False,
        pnet_rand=False,
        pnet_tune=False,
        use_dropout=True,
        model_path=None,
        eval_mode=True,
        verbose=True,
    ):
        super().__init__()
        assert net in ("alex", "vgg", "squeeze") and not verbose
        torch.rand(3)  # as new modules draw their first weights
        self.look = torch.nn.Conv2d(3, 4, 3, bias=False)
        draws = torch.Generator().manual_seed(9)
        self.look.weight.data = torch.randn(self.look.weight.shape, generator=draws)

    def forward(self, in0, in1, retPerLayer=False, normalize=False):
        """Distances (N, 1, 1, 1)."""
        for pictures in (in0, in1):
            assert pictures.ndim == 4 and pictures.shape[1] == 3 and not normalize
        assert in1.abs().max() <= 1.0001 and in1.min() < -0.1  # -1..1, not 0..1
        features = [torch.nn.functional.normalize(self.look(pictures), dim=1) for pictures in (in0, in1)]
        return (features[0] - features[1]).square().sum(1, keepdim=True).mean((2, 3), keepdim=True)


def installed(monkeypatch):
    """Makes `import lpips` find this module."""
    module = types.ModuleType("lpips")
    module.LPIPS = LPIPS
    monkeypatch.setitem(sys.modules, "lpips", module)
