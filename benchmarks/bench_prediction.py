"""The prediction beside what others measured on real GPUs and published (benchmarks/published).

Nothing is compiled or run. The last line is one JSON object: of each file `rho`, Spearman's rank correlation (of a file
with several problems the mean of theirs), `top1`, `top4`, `top8`, what the best of so many predicted fastest reaches of
the best measured speed (geometric mean over the problems), and `ratio_median`, predicted over measured. A vendor's file
has one kernel a problem: `rho` is over the problems, there is no choice to rate, and `under_floor` counts the products
that are predicted faster than the fastest one that was measured. Problems that a constant was fitted to are left out
(`published_runs.FITTED`). `peers` has the same figures of NVIDIA's own model,
where it is installed and has one.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import heuristics_peer
from benchmarks.keep_result import keep_result, options
from benchmarks.prediction_quality import Pairs, kept_share, rounded, spearman
from benchmarks.published_runs import FITTED, PUBLISHED, PublishedSet, read_sets

TOPS = (1, 4, 8)


def figures(published: PublishedSet, predicted: Sequence[float]) -> dict[str, Any]:
    """Of microseconds in the order of the file's runs."""
    fastest = min(run.measured for run in published.runs)
    runs = [
        (us, run)
        for us, run in zip(predicted, published.runs, strict=True)
        if run.problem != FITTED.get(published.name)
    ]
    predicted, measured = [us for us, _ in runs], [run.measured for _, run in runs]
    finite = [ours / theirs for ours, theirs in zip(predicted, measured, strict=True) if ours < math.inf]
    ratio = round(statistics.median(finite), 3)
    if not published.tiles:
        rho = spearman(predicted, measured)
        under = sum(us < fastest for us in predicted)
        return {"rho": rounded(rho, 3), **{f"top{n}": None for n in TOPS}, "ratio_median": ratio, "under_floor": under}
    problems = [
        Pairs(str(problem), *zip(*rows, strict=True))
        for problem in dict.fromkeys(run.problem for _, run in runs)
        if (rows := [(us, run.measured) for us, run in runs if run.problem == problem])
    ]
    rhos = [rho for pairs in problems if (rho := spearman(pairs.predicted, pairs.measured)) is not None]
    tops = {f"top{n}": _mean(kept_share(pairs, n) for pairs in problems) for n in TOPS}
    return {"rho": rounded(statistics.mean(rhos), 3), **tops, "ratio_median": ratio}


def _mean(shares: Iterable[float]) -> float:
    """The geometric mean."""
    return round(statistics.geometric_mean(shares), 3)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--data", type=Path, default=PUBLISHED, help="a folder of CSV files as in benchmarks/published")
    arguments = parser.parse_args()
    data: Path = arguments.data
    try:
        sets = read_sets(data)
    except (ValueError, OSError, KeyError) as error:
        parser.error(f"--data {data}: {error}")
    if not sets:
        parser.error(f"--data {data}: there is no .csv file in it")
    ours = {published.name: figures(published, [run.predicted for run in published.runs]) for published in sets}
    peers = {
        published.name: {heuristics_peer.PACKAGE: figures(published, theirs)}
        for published in sets
        if (theirs := heuristics_peer.estimated_us(published)) is not None
    }
    for name, row in ours.items():
        print(_line(name, row))
        for peer, theirs in peers.get(name, {}).items():
            print(_line(f"  {peer}", theirs))
    tops = {f"top{n}": [row[f"top{n}"] for row in ours.values() if row[f"top{n}"] is not None] for n in TOPS}
    over_all = {name: _mean(values) for name, values in tops.items() if values}
    result = {"benchmark": "prediction", "sets": ours, "all": over_all, "peers": peers}
    keep_result(result, keep=not arguments.no_file and data == PUBLISHED)


def _line(name: str, row: dict[str, Any]) -> str:
    return f"{name:32} " + ", ".join(f"{key} {'-' if value is None else value}" for key, value in row.items())


if __name__ == "__main__":
    main()
