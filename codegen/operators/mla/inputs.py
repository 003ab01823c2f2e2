"""Inputs of the tests of multi-head latent attention: those of attention whose heads share one key, of each sequence by
itself (`codegen/operators/attention/inputs.py`), with keys in pages of any order and NaN wherever there is no key.

`integer`: results are exact, as values are elements of keys, which are whole numbers times a power of two.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from codegen.operator import InputKind
from codegen.operators.attention.inputs import in_pages, one_behind_the_other
from codegen.operators.mla.problem import HEAD_DIM_CKV, TENSORS, MlaProblem

Numbers = npt.NDArray[Any]


def make_inputs(p: MlaProblem, kind: InputKind, rng: np.random.Generator) -> dict[str, Numbers]:
    """Arrays of the logical shapes of queries and caches, and the tables."""
    drawn = one_behind_the_other(p, kind, rng, ("q", "k"))
    q, keys = drawn["q"], drawn["k"][:, 0]
    queries = {"q_nope": q[..., :HEAD_DIM_CKV], "q_pe": q[..., HEAD_DIM_CKV:]}
    paged = in_pages(p, {"ckv_cache": keys[:, :HEAD_DIM_CKV], "kpe_cache": keys[:, HEAD_DIM_CKV:]}, rng)
    made = {**{name: np.ascontiguousarray(array) for name, array in queries.items()}, **drawn, **paged}
    return {name: made[name] for name in (*TENSORS, *p.tables)}
