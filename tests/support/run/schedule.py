"""What a run's processes are given: test files, the longest first, so that the last ones are short; files that share a
costly fixture as if they were one. Smaller pieces would make fixtures of modules twice; processes idle for 1 % of a run
as it is."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from xdist.scheduler import LoadFileScheduling

from tests.support.run.places import ROOT

# By CPU seconds, children included: each takes ten or more.
LONGEST = (
    "integration/test_faults.py",
    "operators/test_every_operator.py",
    "integration/test_serve.py",
    "of_workers/processes/test_cause.py",
    "integration/test_main_job.py",
    "integration/test_fair_jobs.py",
    "of_service/pages/test_pages.py",
    "integration/test_cli_real_service.py",
    "of_workers/gpu/test_gpu_hostile.py",
    "integration/test_job_control.py",
    "of_workers/offline/test_measuring_elsewhere.py",
    "of_workers/offline/test_measure_bundle.py",
    "operators/matmul/test_tensor_ptx.py",
    "operators/conv2d/test_conv2d_ring.py",
    "operators/conv2d/test_conv2d.py",
    "operators/conv2d/test_conv2d_winograd.py",
    "operators/conv2d_dgrad/test_conv2d_dgrad.py",
    "operators/conv2d_wgrad/test_conv2d_wgrad.py",
    "integration/test_older_folder.py",
    "device/test_confirm_primitives.py",
    "integration/test_gpu_job.py",
    "operators/matmul/test_ring.py",
    "operators/attention/test_attention.py",
    "operators/mla/test_mla.py",
    "of_client/kernels/test_workspace_pool.py",
    "operators/rows/test_rows.py",
    "operators/conv2d_dgrad/test_conv2d_dgrad_winograd.py",
    "of_workers/reproduce/test_reproduce.py",
    "of_workers/compile/test_isolation.py",
    "of_workers/compile/test_compile_group.py",
    "of_workers/cpu/test_wrong_kernels.py",
    "operators/matmul/test_matmul.py",
    "operators/reduce/test_reduce.py",
    "of_workers/gpu/test_gpu_child.py",
    "of_workers/cpu/test_cpu_faults.py",
    "of_codegen/test_device_code.py",
    "of_service/test_contract.py",
    "of_storage/maintenance/test_backup.py",
    "of_storage/transitions/test_storage_state_machine.py",
    "of_storage/maintenance/test_retention_property.py",
)
TOGETHER = {
    "of_client/jax/": "JAX",  # its import
    "device/test_confirm_primitives.py": "emulated primitives",
    "device/test_primitives.py": "emulated primitives",
    "device/test_primitives_mma.py": "emulated primitives",
    "device/test_tensor_sums.py": "emulated primitives",
    "of_service/routes/test_import_results.py": "a measured bundle",
    "of_workers/offline/": "a measured bundle",
}
"""By the start of their path."""
# What is last imports JAX, after which forks and collections of garbage take longer.
ORDER = ("integration", "of_workers", "operators", "of_storage", "of_service")


@cache
def place_of(path: Path) -> tuple[int, int]:
    own = path.relative_to(ROOT / "tests")
    name, folder = str(own), own.parts[0]
    return (
        LONGEST.index(name) if name in LONGEST else len(LONGEST),
        ORDER.index(folder) if folder in ORDER else len(ORDER),
    )


class ByFixtures(LoadFileScheduling):  # type: ignore[misc]
    """Files, and those of TOGETHER as if they were one."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return next((name for start, name in TOGETHER.items() if file.startswith(f"tests/{start}")), file)
