"""cukiln for PyTorch: operators whose calls run verified kernels where a cukiln service has them, else PyTorch's own.

    import cukiln.torch as ck

    ck.configure(url="http://127.0.0.1:8765")
    y = ck.matmul(x, weight.t(), bias=bias, activation="gelu")

All of them have gradients, are traced by `torch.compile(fullgraph=True)`, and are safe in CUDA graphs. Only importing
this package imports torch.
"""

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError(f"cukiln.torch needs PyTorch ({error}); install it with `pip install cukiln[torch]`") from error

from cukiln.torch.attentions import attention
from cukiln.torch.compile_backend import backend, register, replaced
from cukiln.torch.convolutions import conv2d
from cukiln.torch.counting import Calls, counted
from cukiln.torch.dispatch import configure, settle, using
from cukiln.torch.masked import masked_activation
from cukiln.torch.norms import layer_norm, rms_norm
from cukiln.torch.options import Options
from cukiln.torch.products import matmul
from cukiln.torch.recording import record
from cukiln.torch.reductions import reduce
from cukiln.torch.softmaxes import softmax

__all__ = ["Calls", "Options", "attention", "backend", "configure", "conv2d", "counted", "layer_norm"]
__all__ += ["masked_activation", "matmul", "record", "reduce", "replaced", "rms_norm", "settle", "softmax", "using"]

register()
