"""ptxas' words become resources of the right kernel."""

from __future__ import annotations

from codegen.text.ptxas_report import Resources, parse_resources

# From nvcc 13.2 -Xptxas -v; the called function `helper` reports a stack of its own.
REPORT = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN1a3runEv' for 'sm_90a'
ptxas info    : Function properties for _ZN1a3runEv
    24 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Function properties for helper
    64 bytes stack frame, 60 bytes spill stores, 56 bytes spill loads
ptxas info    : Used 40 registers, used 2 barriers, 24 bytes cumulative stack size, 1024 bytes smem
ptxas info    : Compile time = 2.758 ms
ptxas info    : Compiling entry function '_ZN1b3runEv' for 'sm_90a'
ptxas info    : Function properties for _ZN1b3runEv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 14 registers, 352 bytes cmem[0]
"""


def test_every_kernel_gets_its_own_numbers() -> None:
    assert parse_resources(REPORT) == {
        "_ZN1a3runEv": Resources(
            registers=40,
            static_shared_bytes=1024,
            spill_load_bytes=8,
            spill_store_bytes=12,
            stack_bytes=24,
            barriers=2,
        ),
        "_ZN1b3runEv": Resources(14, 0, 0, 0, 0, 0),
    }


def test_spills_are_loads_and_stores() -> None:
    assert parse_resources(REPORT)["_ZN1a3runEv"].spill_bytes == 20


def test_a_kernel_whose_report_was_cut_off_is_left_out() -> None:
    cut = REPORT[: REPORT.index("ptxas info    : Used 14")]
    assert set(parse_resources(cut)) == {"_ZN1a3runEv"}


def test_resources_survive_a_row_of_the_database() -> None:
    resources = parse_resources(REPORT)["_ZN1a3runEv"]
    assert Resources.from_dict({**resources.as_dict(), "threads": 128}) == resources
