"""What codegen refuses, as one tree.

```
CodegenError (ValueError)          field: where the fault lies; allowed: what may stand there
├── CannotKey                      a value that has no canonical form
├── UnknownOperator
├── UnknownTarget
├── InvalidSearch                  a search that names what does not exist
│   ├── UnknownTunable             … a tunable that schedules of the problem do not have
│   └── SpaceTooLarge              … more schedules than may be looked at in full
├── InvalidOperator                an operator folder from outside that cannot be loaded
└── TextError                      generated text that must not reach a compiler
    ├── Unclassified               text at namespace scope that the scanner cannot classify
    └── NotUnique                  functions that are not exactly the expected ones
```
Problems are pydantic models: theirs is `pydantic.ValidationError`.
"""

from functools import partial
from typing import Any


class CodegenError(ValueError):
    """Bad input; carries the field at fault and what is allowed there, when there are such."""

    def __init__(self, message: str, *, field: str | None = None, allowed: Any = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.allowed = allowed

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions with keyword arguments do not survive pickling between processes by default.
        return partial(type(self), field=self.field, allowed=self.allowed), (self.message,)


class CannotKey(CodegenError):
    """A value that has no canonical form, so nothing may be remembered under it."""


class UnknownOperator(CodegenError):
    """No operator of that name."""


class UnknownTarget(CodegenError):
    """No data sheet for that architecture."""


class InvalidSearch(CodegenError):
    """A search that names a tunable or value which does not exist."""


class UnknownTunable(InvalidSearch):
    """A search that names a tunable which schedules of the problem do not have."""


class SpaceTooLarge(InvalidSearch):
    """A search without a limit over more schedules than may be looked at in full."""


class InvalidOperator(CodegenError):
    """An operator folder that cannot be loaded."""


class TextError(CodegenError):
    """Generated text that must not reach a compiler."""


class Unclassified(TextError):
    """Text at namespace scope that the scanner cannot classify."""


class NotUnique(TextError):
    """The functions of a text are not exactly the expected ones, each once."""
