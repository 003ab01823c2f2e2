"""As in a new process: what a module's functions have cached is forgotten."""

from types import ModuleType


def forget_caches(*modules: ModuleType) -> None:
    for module in modules:
        for value in vars(module).values():
            if getattr(value, "__module__", None) == module.__name__ and hasattr(value, "cache_clear"):
                value.cache_clear()
