"""Tensors of PyTorch in a direct call of a loaded kernel, whose memory is not what they read as."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cukiln  # noqa: E402

Call = Callable[[cukiln.Kernel, Any, Any], None]
CALLS: dict[str, Call] = {
    "call": lambda kernel, x, out: kernel(x, out),
    "transform": lambda kernel, x, out: kernel.transform(x, out, transformed=0),
}


@pytest.mark.checkout
@pytest.mark.parametrize("negated", ["input", "output"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_negated_view_is_refused_with_its_place_and_the_remedy(
    call: Call, negated: str, library: bytes, digest: str, tmp_path: Path
) -> None:
    kernel = cukiln.load(library, sha256=digest, cache_dir=tmp_path)
    view = torch.fft.rfft(torch.arange(6.0)).conj().imag
    plain = torch.zeros(4)
    assert view.is_neg()
    tensors = (view, plain) if negated == "input" else (plain, view)
    place = 0 if negated == "input" else 1
    with pytest.raises(ValueError, match=rf"tensor {place} of the call is a negated view.*resolve_neg\(\)"):
        call(kernel, *tensors)
    kernel(view.resolve_neg(), plain)
