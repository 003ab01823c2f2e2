"""One set of checks for every operator: its test module declares data, `add_checks` gives it the tests.

```
DECLARED = (Declarations(operator="softmax", problems=Problems(...), ...),)
add_checks(globals())
```

What an operator does not declare must be named in `without`, with where else it is checked or why it cannot be.
`tests/operators/test_every_operator.py` fails where an operator has no declarations.
"""

import pytest

KINDS = (
    "problems",
    "searches",
    "references",
    "verifications",
    "mutations",
    "random_cases",
    "machine_code",
    "launches",
    "calls",
)

pytest.register_assert_rewrite(*(f"{__name__}.{kind}" for kind in (*KINDS, "jobs")))
