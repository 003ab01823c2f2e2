"""What `cukiln doctor` found, and how it is shown."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

State = Literal["found", "missing", "optional"]  # optional: not here, and nothing fails without it

_COLOUR = {"found": "green", "missing": "red", "optional": "yellow"}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for. `todo`: a sentence, where something is to be done."""

    name: str
    state: State
    detail: str
    todo: str | None = None


@dataclass(frozen=True)
class Report:
    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        return not any(finding.state == "missing" for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        return {"healthy": self.healthy, "findings": [asdict(finding) for finding in self.findings]}

    def print_to(self, console: Console) -> None:
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        for finding in self.findings:
            text = Text(finding.detail)
            if finding.todo:
                text.append(f"\n→ {finding.todo}", style="bold" if finding.state == "missing" else "")
            table.add_row(finding.name, Text(finding.state, style=_COLOUR[finding.state]), text)
        console.print(table)
        missing = [finding.name for finding in self.findings if finding.state == "missing"]
        end = f"Missing: {', '.join(missing)}." if missing else "All that is needed is here."
        console.print(end, highlight=False, markup=False)
