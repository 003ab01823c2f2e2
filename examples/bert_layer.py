"""A layer of BERT with verified kernels: `torch.compile(model, backend="cukiln")`.

    make serve                                              # in another terminal
    .venv/bin/python examples/bert_layer.py --target cpu    # without a GPU: small, by the emulation of kernels

Biases, gelu and the residuals are of the kernels of the products before them.
"""

from __future__ import annotations

import torch
from compiled_model import arguments, device_of, main
from torch import nn
from torch.nn import functional


class BertLayer(nn.Module):
    """Devlin et al. 2019, in the order of the original: norms behind the residuals."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)
        self.norm1 = nn.LayerNorm(hidden)
        self.ffn1 = nn.Linear(hidden, 4 * hidden)
        self.ffn2 = nn.Linear(4 * hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, hidden = x.shape
        of_heads = self.qkv(x).view(batch, tokens, 3, self.heads, hidden // self.heads)
        q, k, v = of_heads.permute(2, 0, 3, 1, 4).unbind()
        attended = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, hidden)
        x = self.norm1(x + self.dropout(self.proj(attended)))
        inner = functional.gelu(self.ffn1(x))
        return self.norm2(x + self.dropout(self.ffn2(inner)))  # type: ignore[no-any-return]


if __name__ == "__main__":
    given = arguments("A layer of BERT with verified kernels, beside eager.")
    device = device_of(given)
    torch.manual_seed(0)
    small = device.type == "cpu"
    layer = BertLayer(64, 2) if small else BertLayer(768, 12)
    x = torch.randn((2, 16, 64) if small else (8, 128, 768), device=device)
    main(layer.eval().to(device), x, given)
