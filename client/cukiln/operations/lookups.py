"""Lookups: the winners of problems, from memory, the disk or the service."""

import hashlib
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import httpx2
from pydantic import ValidationError

from cukiln.counted import counted
from cukiln.errors import CukilnError, UnexpectedAnswer
from cukiln.gpu import local_target
from cukiln.http.bodies import largest_lookup
from cukiln.http.seconds import MOST_WAITED
from cukiln.http.transport import Call
from cukiln.job_request import check_problems, encode
from cukiln.operations.answers import json_object, not_valid, parse, unexpected
from cukiln.operations.state import NO_ANSWER, ClientState
from cukiln.operations.steps import Ask, OnMissTerms, Operation, Prepared
from cukiln.types import LookedUp, LookupResult, Lookups, OnMiss, PartialLookups, PartialResult, Priority
from cukiln.types.problems import Problem

LARGEST_LOOKUP = 10_000  # problems in one request
BUDGETED_PROBLEMS = 100  # of one request, within the budget of a lookup; more get more time, in proportion
NEAREST_SECONDS = 5.0  # kernels of a neighbour are asked for again after: the problem's own are being tuned

_T = TypeVar("_T")
_Named = TypeVar("_Named", LookedUp, PartialResult)


class LookupOperations(ClientState):
    def prepare(
        self,
        problem: Problem,
        *,
        target: str | None = None,
        device_class: str | None = None,
        workspace_limit_bytes: int | None = None,
        deterministic: bool = False,
    ) -> Prepared:
        """The problem with these options, for `lookup`: what is looked up many times is written as JSON once."""
        check_problems([problem])
        return self._asked([problem], target, device_class, workspace_limit_bytes, deterministic)[0]

    def _prepare(self, problem: Mapping[str, Any], options: Mapping[str, Any]) -> Prepared:
        shared = {name: value for name, value in options.items() if value is not None}
        if "target" not in shared and "target" not in problem and (target := local_target()) is not None:
            shared["target"] = target
        name = problem.get("name")
        sent = {key: value for key, value in problem.items() if key != "name"}
        digest = hashlib.sha256(self.url.encode() + b"\n" + encode({**shared, "problems": [sent]})).hexdigest()
        return Prepared(digest, name if isinstance(name, str) else None, problem, shared)

    def _asked(
        self,
        problems: Sequence[Problem | Prepared],
        target: str | None,
        device_class: str | None,
        workspace_limit_bytes: int | None,
        deterministic: bool,
    ) -> list[Prepared]:
        """The problems of a lookup; the options are those of what is not prepared."""
        options = {
            "target": target,
            "device_class": device_class,
            "workspace_limit_bytes": workspace_limit_bytes,
            "deterministic": deterministic or None,
        }
        listed = check_problems(problems, Prepared)
        return [problem if type(problem) is Prepared else self._prepare(problem, options) for problem in listed]

    def _lookup(
        self,
        problems: Sequence[Problem | Prepared],
        *,
        target: str | None = None,
        device_class: str | None = None,
        workspace_limit_bytes: int | None = None,
        deterministic: bool = False,
        on_miss: OnMiss = "none",
        search: Mapping[str, Any] | None = None,
        priority: Priority | None = None,
        refresh: bool = False,
    ) -> Operation[list[LookedUp]]:
        """The known winner of each problem, in order; `record` is None where there is none yet. Nothing is tuned unless
        `on_miss` says so.

        `target`: an architecture; default: that of this machine's GPU. `workspace_limit_bytes` and `deterministic`
        (equal bits in every run) narrow the kernels of each record. The options are those of problems that are not
        `prepare`d.

        A winner that the service answered before, to this process or to an earlier one, comes from the local cache;
        where that is longer ago than `fresh_seconds`, the service is asked behind the caller's back. Misses are asked
        for, within the client's `lookup_budget`. A service that does not answer, or not as cukiln does, is a miss whose
        `unanswered` says why; one that refuses the request raises `BadRequest`, `NotAuthorised` or `NotFound`.
        `on_miss`: `tune` makes a job of misses, by `search` and `priority`, where none tries them (`tuning` names it).
        `nearest` does, and answers verified kernels that are right for the problem but were tuned for one near by:
        such a record is `tuned_for` that, and is asked for again after 5 s; it is not kept on the disk.
        `refresh`: ask the service for every problem, as patiently as for a job, and raise `ServiceError`.
        """
        missed = OnMissTerms(on_miss, search, priority)
        asked = self._asked(problems, target, device_class, workspace_limit_bytes, deterministic)
        answers: dict[str, LookedUp] = {}
        missing: dict[str, Prepared] = {}
        stale: dict[str, Prepared] = {}
        now = time.time()
        for prepared in asked:
            remembered = None if refresh else self._memory.winner(prepared.digest)
            fresh_seconds = self._fresh_seconds
            if remembered is None and on_miss == "nearest" and not refresh:
                remembered, fresh_seconds = self._memory.nearest(prepared.digest), NEAREST_SECONDS
            if remembered is None:
                missing[prepared.digest] = prepared
                continue
            answers[prepared.digest] = remembered
            if not 0 <= now - remembered.at < fresh_seconds:
                stale[prepared.digest] = prepared
        if missing:
            asked_now = list(missing.values())
            answers |= (
                (yield from self._ask(asked_now, missed, patient=True)) if refresh else (yield Ask(asked_now, missed))
            )
        if stale and not (self._transport.breaker.open or self._transport.offline):
            self._revalidate(list(stale.values()), missed)
        return [_named(answers[prepared.digest], prepared.name) for prepared in asked]

    def _lookup_fields(
        self,
        problems: Sequence[Problem | Prepared],
        fields: Sequence[str],
        *,
        target: str | None = None,
        device_class: str | None = None,
        workspace_limit_bytes: int | None = None,
        deterministic: bool = False,
        on_miss: OnMiss = "none",
        search: Mapping[str, Any] | None = None,
        priority: Priority | None = None,
    ) -> Operation[list[PartialResult]]:
        """As `lookup`, but of each record these fields alone, as JSON: `revision`, or `front.so_sha256` of each kernel.
        The service is asked for every problem, as patiently as for a job: nothing is taken from a cache, or kept.
        Raises `ServiceError`."""
        asked = self._asked(problems, target, device_class, workspace_limit_bytes, deterministic)
        terms = {"fields": list(fields), **OnMissTerms(on_miss, search, priority).fields}
        answers: dict[str, PartialResult] = {}
        for shared, part in _requests(list({prepared.digest: prepared for prepared in asked}.values())):
            body = encode({**shared, **terms, "problems": [dict(each.problem) for each in part]})
            response = yield Call("POST", "/v1/lookups", body, most_bytes=largest_lookup(len(part)))
            results = _as_many(response, parse(response, PartialLookups).results, part)
            answers |= {each.digest: result for each, result in zip(part, results, strict=True)}
        return [_named(answers[prepared.digest], prepared.name) for prepared in asked]

    def _ask(
        self, prepared: Sequence[Prepared], missed: OnMissTerms, *, patient: bool
    ) -> Operation[dict[str, LookedUp]]:
        """Of the service, by digest; it is remembered what it has. `patient`: without a budget; raise errors."""
        answers: dict[str, LookedUp] = {}
        for shared, part in _requests(prepared):
            body = encode({**shared, **missed.fields, "problems": [dict(each.problem) for each in part]})
            seconds = min(self._lookup_budget * max(1.0, len(part) / BUDGETED_PROBLEMS), MOST_WAITED)
            read = partial(_results if patient else _results_of_each, asked=part)
            try:
                most = largest_lookup(len(part))
                results = yield Call(
                    "POST", "/v1/lookups", body, seconds=None if patient else seconds, read=read, most_bytes=most
                )
            except NO_ANSWER as error:
                if patient:
                    raise
                miss = LookedUp(name=None, key="", record=None, unanswered=str(error))
                answers |= {each.digest: miss for each in part}
                continue
            now = time.time()
            for each, result in zip(part, results, strict=True):
                answers[each.digest] = (
                    LookedUp(name=None, key="", record=None, unanswered=str(result))
                    if isinstance(result, UnexpectedAnswer)
                    else LookedUp(name=None, key=result.key, record=result.record, tuning=result.tuning, at=now)
                )
        self._memory.keep(answers, self.url)
        return answers

    def _revalidate(self, stale: Sequence[Prepared], missed: OnMissTerms) -> None:
        """Ask the service again, behind the caller's back."""
        raise NotImplementedError

    def _claim(self, stale: Sequence[Prepared]) -> list[Prepared]:
        """Those of `stale` that are not asked for already; `_asked_again` gives them back."""
        new = self._memory.claim(prepared.digest for prepared in stale)
        return [prepared for prepared in stale if prepared.digest in new]

    def _asked_again(self, prepared: Sequence[Prepared], missed: OnMissTerms) -> Operation[None]:
        digests = [each.digest for each in prepared]
        try:
            yield from self._ask(prepared, missed, patient=False)
        except CukilnError:
            self._memory.renew(digests)  # it refuses what it has answered: it is not to be asked at every call
        finally:
            self._memory.release(digests)


def _results(response: httpx2.Response, asked: Sequence[Prepared]) -> list[LookupResult]:
    return _as_many(response, parse(response, Lookups).results, asked)


def _results_of_each(response: httpx2.Response, asked: Sequence[Prepared]) -> Sequence[LookupResult | UnexpectedAnswer]:
    """`_results`, but where some of them alone are not cukiln's, these are the errors that say so."""
    try:
        return _results(response, asked)
    except UnexpectedAnswer:
        given = json_object(response).get("results")
        results = [_result(response, each) for each in given] if isinstance(given, list) else []
        wrong = sum(isinstance(result, UnexpectedAnswer) for result in results)
        if len(results) != len(asked) or wrong in (0, len(asked)):
            raise
        return results


def _result(response: httpx2.Response, value: Any) -> LookupResult | UnexpectedAnswer:
    try:
        return LookupResult.model_validate(value)
    except ValidationError as error:
        return not_valid(response, error)


def _as_many(response: httpx2.Response, results: list[_T], asked: Sequence[Prepared]) -> list[_T]:
    """The results, one of each problem. Raises `UnexpectedAnswer`."""
    if len(results) != len(asked):
        raise unexpected(response, f"{counted(len(results), 'result')} for {counted(len(asked), 'problem')}")
    return results


def _named(result: _Named, name: str | None) -> _Named:
    """A result without a name is named by the service after its place in the request, which is not its place here."""
    return result if result.name == name else result.model_copy(update={"name": name})


def _requests(prepared: Sequence[Prepared]) -> list[tuple[Mapping[str, Any], list[Prepared]]]:
    """As few requests as possible: of problems with the same options, so many at most."""
    groups: dict[bytes, list[Prepared]] = {}
    for each in prepared:
        groups.setdefault(encode(each.shared), []).append(each)
    return [
        (group[0].shared, group[start : start + LARGEST_LOOKUP])
        for group in groups.values()
        for start in range(0, len(group), LARGEST_LOOKUP)
    ]
