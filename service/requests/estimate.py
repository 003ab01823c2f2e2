"""`cukiln profile FILE`: the profile of a request without a service; nothing is compiled, run or kept."""

from collections.abc import Mapping
from typing import Any

from codegen.counts import Openings
from codegen.job_request import JobRequest
from codegen.lower import lower
from codegen.predict.predict_uncompiled import estimate as estimated_resources
from codegen.targets import target, targets
from cukiln.types import ProfileLeftOut, ProfileOperator, ProfilePage
from service.http.errors import Refused, refuse
from service.requests.resolve import Known, read_request, resolve_jobs
from storage.config.operator_path import load_operator_path
from storage.config.settings import load_settings
from storage.reports.profile import profile_row

__all__ = ["Openings", "Refused", "estimate"]


def estimate(request: Mapping[str, Any], openings: Openings) -> ProfilePage:
    """Of each problem the schedule of its search that is predicted fastest. Problems of which rules leave no schedule
    are left out. Raises Refused, as a service would, and where that is all of them."""
    settings = load_settings()
    load_operator_path(settings)
    job = read_request(JobRequest, dict(request), settings.max_problems)
    defaults = Known(settings.default_target, frozenset(targets()))
    rows: list[ProfileOperator] = []
    left_out: list[ProfileLeftOut] = []
    for problem in resolve_jobs(job, defaults, settings):
        sheet, search = target(problem.target), problem.search.model_copy(update={"keep": 1})
        lowered = lower(problem.problem, sheet, search, job.workspace_limit_bytes, deterministic=job.deterministic)
        if lowered.why_empty:
            operator = problem.problem.operator
            left_out.append(ProfileLeftOut(problem=problem.name, operator=operator, why=lowered.why_empty))
            continue
        (best,) = lowered.candidates
        resources = estimated_resources(best, sheet)
        rows.append(profile_row(problem.name, problem.device_class, best, sheet, resources, openings))
    if not rows and left_out:
        first = left_out[0]
        raise refuse("empty-search-space", f"{first.problem}: {first.why}", field="search")
    return ProfilePage(filters=openings.filters, opened=openings.operands, operators=rows, left_out=left_out)
