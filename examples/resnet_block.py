"""A block of ResNet with verified kernels: `torch.compile(model, backend="cukiln")`.

    make serve                                                # in another terminal
    .venv/bin/python examples/resnet_block.py --target cpu    # without a GPU: small, by the emulation of kernels

Batch normalisation is folded into the convolutions; biases, the residual and relu are of their kernels.
"""

from __future__ import annotations

import torch
from compiled_model import arguments, device_of, main
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval


class Block(nn.Module):
    """He et al. 2015: the first block of a stage, which halves the image."""

    def __init__(self, channels: int, filters: int) -> None:
        super().__init__()
        self.conv1 = folded(nn.Conv2d(channels, filters, 3, stride=2, padding=1, bias=False))
        self.conv2 = folded(nn.Conv2d(filters, filters, 3, padding=1, bias=False))
        self.shortcut = folded(nn.Conv2d(channels, filters, 1, stride=2, bias=False))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = self.shortcut(x)
        out = self.conv2(self.relu(self.conv1(x)))
        out += residual
        return self.relu(out)  # type: ignore[no-any-return]


def folded(convolution: nn.Conv2d) -> nn.Conv2d:
    """With a batch normalisation behind it, as it is after a training."""
    norm = nn.BatchNorm2d(convolution.out_channels)
    assert norm.running_mean is not None and norm.running_var is not None
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2.0)
    return fuse_conv_bn_eval(convolution.eval(), norm.eval()).requires_grad_()


if __name__ == "__main__":
    given = arguments("A block of ResNet with verified kernels, beside eager.")
    device = device_of(given)
    torch.manual_seed(0)
    small = device.type == "cpu"
    block = Block(8, 16) if small else Block(64, 128)
    x = torch.randn((1, 8, 12, 12) if small else (8, 64, 56, 56), device=device)
    main(block.to(device), x, given)
