"""Verified kernels in JAX: functions that `jax.jit`, `jax.vmap` and `jax.grad` take, with XLA where no kernel is known.

```python
import cukiln.jax as cj

cj.configure(on_miss="tune")  # the service is found as `cukiln.Client` finds it
y = jax.jit(lambda x, w, b: cj.matmul(x, w, bias=b, activation="gelu"))(x, w, b)
```

While a function is traced, the winner of each call's problem is looked up, within the client's lookup budget. Where
there is one, and the vendor's library was not faster, the compiled program calls its kernel, else XLA computes it.
A program that was compiled before its problems were tuned keeps XLA's way: `jax.clear_caches()` has it traced again.
Reverse-mode gradients are there, forward mode is not.
"""

from cukiln.jax.attention import attention
from cukiln.jax.convolution import conv2d
from cukiln.jax.kernels import configure, record
from cukiln.jax.product import matmul
from cukiln.jax.rows import layer_norm, masked_activation, reduce, rms_norm, softmax

__all__ = [
    "attention",
    "configure",
    "conv2d",
    "layer_norm",
    "masked_activation",
    "matmul",
    "record",
    "reduce",
    "rms_norm",
    "softmax",
]
