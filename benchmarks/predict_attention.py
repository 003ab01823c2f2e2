"""Predicted TFLOP/s of attention beside what others measured and published. Nothing is compiled or run here.

Of each problem of `LENGTHS` the best of all candidates of a level by the roofline (`codegen.predict`), with the setup
of the published figures: 16,384 tokens in sequences of one length, 2,048 columns of all heads together, fp16. FLOPs are
counted as there: 4 · tokens · length · columns, half of that with a causal mask.

The last line is one JSON object: `predicted_not_measured` by target, size of head, mask and length, with the schedule
of each, and `published` with the sources. `docs/operators/attention.md` has it as a table.
"""

import argparse
import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from codegen.lower import lower
from codegen.operators import operator
from codegen.predict.predict_uncompiled import predict_uncompiled
from codegen.search.search import Search
from codegen.targets import target

TOKENS, COLUMNS = 16384, 2048
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
HEAD_DIMS = (64, 128)
TARGETS = ("sm_80", "sm_90a")
LEVEL = 2


@dataclass(frozen=True)
class Published:
    """TFLOP/s by length, of one implementation on one product; None where the figure's legend covers the number."""

    what: str
    target: str
    head_dim: int
    causal: bool
    tflops: tuple[int | None, ...]
    source: str


FLASH_3 = "Shah et al., FlashAttention-3, arXiv:2407.08608, figure 5"
FLASH_2_FORWARD = "Dao, FlashAttention-2, arXiv:2307.08691, section 4.1"
FLASH_2 = "Dao, FlashAttention-2, arXiv:2307.08691, figure 4"
IMAGES = {
    FLASH_3: "https://github.com/Dao-AILab/flash-attention/blob/main/assets/flash3_fp16_fwd.png",
    FLASH_2: "https://github.com/Dao-AILab/flash-attention/blob/main/assets/flash2_a100_fwd_bwd_benchmark.png",
    FLASH_2_FORWARD: "https://arxiv.org/abs/2307.08691",
}
FLASH_2_A100_FORWARD = 230
"""TFLOP/s that FlashAttention-2 "reaches up to" forward on A100, of all head sizes, masks and lengths."""
_BOTH_WAYS = "FlashAttention-2, forward and backward"
PUBLISHED = (
    Published(_BOTH_WAYS, "sm_80", 64, False, (132, None, 162, 171, 175, 176), FLASH_2),
    Published(_BOTH_WAYS, "sm_80", 64, True, (88, 119, 140, 156, 165, 171), FLASH_2),
    Published(_BOTH_WAYS, "sm_80", 128, False, (None, None, 187, 196, 201, 203), FLASH_2),
    Published(_BOTH_WAYS, "sm_80", 128, True, (99, 133, 155, 173, 182, 189), FLASH_2),
    Published("FlashAttention-2", "sm_90a", 64, False, (282, 306, 318, 321, 322, 324), FLASH_3),
    Published("FlashAttention-3", "sm_90a", 64, False, (333, 392, 460, 476, 496, 497), FLASH_3),
    Published("FlashAttention-2", "sm_90a", 64, True, (180, 229, 262, 284, 295, 299), FLASH_3),
    Published("FlashAttention-3", "sm_90a", 64, True, (197, 265, 371, 420, 460, 473), FLASH_3),
    Published("FlashAttention-2", "sm_90a", 128, False, (309, 350, 362, 368, 370, 370), FLASH_3),
    Published("FlashAttention-3", "sm_90a", 128, False, (467, 565, 625, 638, 646, 648), FLASH_3),
    Published("FlashAttention-2", "sm_90a", 128, True, (191, 260, 298, 319, 333, 335), FLASH_3),
    Published("FlashAttention-3", "sm_90a", 128, True, (292, 423, 521, 579, 602, 616), FLASH_3),
)


@dataclass(frozen=True)
class Best:
    """The best predicted candidate of a problem."""

    tflops: float
    us: float
    bound_by: str
    schedule: dict[str, Any]


def fields_of(head_dim: int, causal: bool, length: int) -> dict[str, Any]:
    """The problem, as a request spells it."""
    return {"operator": "attention", "batch": TOKENS // length, "seq_q": length, "heads_q": COLUMNS // head_dim,
            "head_dim_qk": head_dim, "causal": causal, "dtype": "float16"}  # fmt: skip


def flops(causal: bool, length: int) -> float:
    """As the published figures count them: half of the scores with a causal mask."""
    return 4.0 * TOKENS * length * COLUMNS / (2 if causal else 1)


@cache
def best(arch: str, head_dim: int, causal: bool, length: int, level: int = LEVEL) -> Best:
    """Of all candidates of the level."""
    sheet = target(arch)
    problem = operator("attention").parse(fields_of(head_dim, causal, length))
    candidates = lower(problem, sheet, Search(level=level)).candidates
    predictions = [(predict_uncompiled(candidate, sheet), candidate) for candidate in candidates]
    prediction, candidate = min(predictions, key=lambda pair: (pair[0].us, pair[1].id))
    tflops = flops(causal, length) / prediction.us * 1e-6
    return Best(tflops, prediction.us, prediction.bound_by, candidate.schedule.as_dict())


def table(arch: str) -> str:
    """Of one target, in Markdown."""
    rows = [
        f"| {target(arch).product}, head, mask | {' | '.join(map(str, LENGTHS))} |",
        f"|---{'|---' * len(LENGTHS)}|",
    ]
    for head_dim in HEAD_DIMS:
        for causal in (False, True):
            about = f"{head_dim}, {'causal' if causal else 'none'}"
            ours = [f"{best(arch, head_dim, causal, length).tflops:.0f}" for length in LENGTHS]
            rows.append(f"| {about}: **predicted**, ours | {' | '.join(ours)} |")
            for figure in PUBLISHED:
                if (figure.target, figure.head_dim, figure.causal) == (arch, head_dim, causal):
                    cells = ["–" if value is None else str(value) for value in figure.tflops]
                    rows.append(f"| {about}: measured, {figure.what} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def result(level: int) -> dict[str, Any]:
    """All of it."""
    predicted = [
        {
            "target": arch, "head_dim": head_dim, "causal": causal, "length": length,
            "tflops": round(found.tflops, 1), "us": round(found.us, 1),
            "bound_by": found.bound_by, "schedule": found.schedule,
        }
        for arch in TARGETS for head_dim in HEAD_DIMS for causal in (False, True) for length in LENGTHS
        for found in (best(arch, head_dim, causal, length, level),)
    ]  # fmt: skip
    published = [{**vars(figure), "link": IMAGES[figure.source]} for figure in PUBLISHED]
    return {"benchmark": "predict-attention", "level": level, "lengths": LENGTHS, "predicted_not_measured": predicted,
            "published": published, "flash_2_a100_forward_at_most": FLASH_2_A100_FORWARD}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--level", type=int, default=LEVEL, choices=(0, 1, 2), help="of the search")
    level = parser.parse_args().level
    print(json.dumps(result(level)))


if __name__ == "__main__":
    main()
