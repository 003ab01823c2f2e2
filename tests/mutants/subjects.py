"""Whose mutants are made: every operator, and those of its algorithms whose text is another, each with the kernels that
its tests verify."""

from __future__ import annotations

import importlib
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass

from codegen.kernel import Kernel
from tests.operators.harness.declarations import Declarations
from tests.operators.harness.verifications import classes

OF_TESTS = "tests.operators"


@dataclass(frozen=True)
class Subject:
    """Kernels of `operator`, as the modules of its tests declare them."""

    name: str
    operator: str
    modules: tuple[str, ...]

    def kernels(self) -> dict[str, Kernel]:
        declared = [each for module in self.modules for each in _declared(module) if each.operator == self.operator]
        return {name: kernel for each in declared for name, kernel in _kernels(each).items()}

    def sample(self, count: int, seed: int) -> dict[str, Kernel]:
        """So many kernels, no two alike where the operator has others: again and again the one of most new classes
        among a few of a seed."""
        kernels = self.kernels()
        rng = random.Random(f"{seed} {self.name}")
        names, chosen, having = sorted(kernels), dict[str, Kernel](), set[tuple[object, ...]]()
        while names and len(chosen) < count:
            few = rng.sample(names, min(4, len(names)))
            best = max(few, key=lambda name: (len(classes(kernels[name]) - having), name))
            names.remove(best)
            chosen[best] = kernels[best]
            having |= classes(kernels[best])
        return chosen


SUBJECTS = tuple(
    Subject(name, operator, tuple(f"{OF_TESTS}.{module}" for module in modules))
    for name, operator, modules in (
        ("matmul", "matmul", ["matmul.test_matmul"]),
        ("matmul over rings", "matmul", ["matmul.test_ring"]),
        ("conv2d", "conv2d", ["conv2d.test_conv2d"]),
        ("conv2d over rings", "conv2d", ["conv2d.test_conv2d_ring"]),
        ("conv2d by Winograd", "conv2d", ["conv2d.test_conv2d_winograd"]),
        ("conv2d_dgrad", "conv2d_dgrad", ["conv2d_dgrad.test_conv2d_dgrad"]),
        ("conv2d_dgrad over rings", "conv2d_dgrad", ["conv2d.test_conv2d_ring"]),
        ("conv2d_dgrad by Winograd", "conv2d_dgrad", ["conv2d_dgrad.test_conv2d_dgrad_winograd"]),
        ("conv2d_wgrad", "conv2d_wgrad", ["conv2d_wgrad.test_conv2d_wgrad"]),
        ("conv2d_wgrad over rings", "conv2d_wgrad", ["conv2d.test_conv2d_ring"]),
        ("reduce", "reduce", ["reduce.test_reduce"]),
        ("softmax", "softmax", ["rows.test_rows"]),
        ("layer_norm", "layer_norm", ["rows.test_rows"]),
        ("rms_norm", "rms_norm", ["rows.test_rows"]),
        ("masked_activation", "masked_activation", ["masked_activation.test_masked_activation"]),
        ("attention", "attention", ["attention.test_attention"]),
        (
            "attention, pages and ragged",
            "attention",
            ["attention.test_attention_paged", "attention.test_attention_ragged"],
        ),
        ("mla", "mla", ["mla.test_mla"]),
    )
)


def _declared(module: str) -> tuple[Declarations, ...]:
    os.environ.setdefault("CUKILN_TEST_SEED", "0")  # by which the module's own tests are chosen
    declared = importlib.import_module(module).DECLARED
    assert isinstance(declared, tuple)
    return declared


def _kernels(declared: Declarations) -> Mapping[str, Kernel]:
    """Those that its tests verify; where they verify none but as mutants and random cases, those of the mutants."""
    if declared.verifications is not None:
        return declared.verifications.kernels()
    assert declared.mutations is not None, declared.operator
    return declared.mutations.kernels(declared.operator)
