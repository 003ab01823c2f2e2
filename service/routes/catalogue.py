"""The catalogue: operators, targets, and the time that stages took."""

from functools import lru_cache
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from starlette.responses import Response

from codegen.operator import Operator
from codegen.operators import operators
from codegen.search.search import Search
from codegen.search.space import allowed_json
from codegen.targets import targets
from cukiln.types import DeviceReport, OperatorReport, Operators, TargetReport, Targets, Timings
from service.context import ServiceDep
from service.http.answers import json_response
from service.openapi import problems
from storage.entities.heartbeats import pauses
from storage.reports.times import timings

router = APIRouter(prefix="/v1", tags=["catalogue"])


@router.get("/operators", operation_id="list_operators", response_model=Operators, responses=problems())
def get_operators() -> Response:
    """JSON Schema of every operator's problem and of a search, and the tunables that a search may name."""
    return json_response(Operators(operators=[_operator(operator) for _, operator in sorted(operators().items())]))


@router.get("/targets", operation_id="list_targets", response_model=Targets, responses=problems("database-unavailable"))
def get_targets(service: ServiceDep) -> Response:
    """Architectures with their data sheets, the live toolchains that compile for them, and the GPUs that measure."""
    alive = service.alive(with_drained=True)
    catalogue = alive.known(service.settings.default_target, service.settings.cuda)
    reports = [
        TargetReport(
            target=name,
            name=sheet.product,
            data_sheet=sheet.data_sheet(),
            emulates=sheet.emulates,
            toolchains=[toolchain.digest for toolchain in alive.toolchains if name in toolchain.targets],
            device_classes=catalogue.device_classes(name),
        )
        for name, sheet in targets().items()
    ]
    toolchains = [dict(toolchain._mapping) for toolchain in alive.toolchains]
    unknown = {"multiprocessors": 0, "memory_bytes": 0}
    devices = [DeviceReport.model_validate({**unknown, **row.description, **row._mapping}) for row in alive.devices]
    with service.database.read() as session:
        paused = pauses(session)
    return json_response(Targets(targets=reports, toolchains=toolchains, devices=devices, paused=paused))


@router.get(
    "/timings",
    operation_id="get_timings",
    response_model=Timings,
    responses=problems("invalid-value", "database-unavailable"),
)
def get_timings(
    service: ServiceDep, by: Annotated[Literal["operator", "job", "day"], Query()] = "operator"
) -> Response:
    """Wall and CPU seconds of each stage, wall seconds of each phase, summed by operator, job or day (UTC)."""
    with service.database.read() as session:
        return json_response(timings(session, by))


@lru_cache
def _operator(operator: Operator) -> OperatorReport:
    tunables = {
        tunable.name: {
            "allowed": allowed_json(tunable.allowed),
            "default": tunable.default,
            "launch_time": tunable.launch_time,
            "meaning": tunable.meaning,
        }
        for tunable in operator.tunables
    }
    return OperatorReport(
        operator=operator.name, schema=operator.schema(), tunables=tunables, search=Search.model_json_schema()
    )
