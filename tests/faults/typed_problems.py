"""What schemathesis loads besides its own checks: every refusal is one of the service's problems."""

from __future__ import annotations

import schemathesis

from tests.faults.answers import wrong_in


@schemathesis.check
def typed_problem(_context: object, response: schemathesis.Response, _case: object) -> None:
    headers = {name.lower(): values[0] for name, values in response.headers.items()}
    wrong = wrong_in(response.status_code, headers, response.content)
    assert wrong is None, wrong
