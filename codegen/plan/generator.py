"""Which generator searched: what a recorded search says it covered holds only for the code that covered it."""

from functools import cache

from codegen.canonical import digest
from codegen.operators import operator
from codegen.search.space import allowed_json
from codegen.text.render_group import headers_digest

# Raised when rules, levels or the prediction change which candidates are tried or which of them win.
GENERATOR_VERSION = 4


@cache
def generator(operator_name: str) -> str:
    """Digest of an operator's kernel text with the headers it inlines, its tunables, and the generator's version."""
    own = operator(operator_name)
    return digest(
        "generator",
        GENERATOR_VERSION,
        headers=headers_digest(operator_name),
        tunables={tunable.name: allowed_json(tunable.allowed) for tunable in own.tunables},
    )
