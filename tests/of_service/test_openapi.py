"""The description at /openapi.json, read by tools that are not ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from openapi_spec_validator import OpenAPIV31SpecValidator

from codegen.operators import operators
from tests.support.fixtures.api import MATMUL, Api

OWN_WORDS = {"list_operators", "submit_job", "get_job", "cancel_job", "look_up_winners", "get_winner", "watch_job"}

# A user of the client that was made: problems are typed by their operator, an answer is a model.
USE = """
import sys
from cukiln_client import Client
from cukiln_client.api.catalogue import list_operators
from cukiln_client.api.jobs import get_job, submit_job
from cukiln_client.models import JobRequest, MatmulProblem

client = Client(base_url=sys.argv[1])
problem = MatmulProblem.from_dict({"operator": "matmul", "m": 64, "n": 48, "k": 32})
job = submit_job.sync(client=client, body=JobRequest(problems=[problem], target="sm_80"))
print(len(list_operators.sync(client=client).operators), get_job.sync(job.job, client=client).problems[0].operator)
"""


def test_the_description_is_valid_and_names_each_operation(shared_api: Api) -> None:
    document = shared_api.client.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1.")
    OpenAPIV31SpecValidator(document).validate()
    methods = [method for path in document["paths"].values() for method in path.values()]
    names = [method["operationId"] for method in methods]
    assert len(set(names)) == len(names) and set(names) >= OWN_WORDS
    assert not [name for name in names if "_v1_" in name or not name.isidentifier()], "each route has an operation_id"
    assert all(method.get("description") for method in methods)


def test_a_client_that_is_made_of_the_description_works(api: Api, tmp_path: Path) -> None:
    made, settings = tmp_path / "made", tmp_path / "settings.yaml"
    settings.write_text("post_hooks: []\n")  # it would format and check what it made
    make = [str(Path(sys.executable).parent / "openapi-python-client"), "generate", "--url", f"{api.url}/openapi.json"]
    make += ["--output-path", str(made), "--config", str(settings), "--fail-on-warning"]
    done = subprocess.run(make, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    use = [sys.executable, "-c", USE, api.url]
    used = subprocess.run(use, cwd=made, capture_output=True, text=True, check=False)
    assert used.stdout.split() == [str(len(operators())), MATMUL["operator"]], used.stderr
