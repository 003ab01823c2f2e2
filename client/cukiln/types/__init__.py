"""The answers of the service, defined once for service and client. Durations are seconds unless the name says `_us`."""

# ruff: noqa: F403
from cukiln.types.jobs import *
from cukiln.types.records import *
from cukiln.types.reports import *
