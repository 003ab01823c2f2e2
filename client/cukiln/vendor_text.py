"""How the vendor's library is written beside a kernel: the ratio with its interval, a tie, or its wrong result."""

from dataclasses import dataclass

from cukiln.types import VendorRatio, WinnerRecord, WinnerSummary

ANY_LIBRARY = "vendor"


@dataclass(frozen=True)
class Vendor:
    """The vendor's library beside a kernel. `times`: how many times as fast the kernel is; `ratio`: the same with its
    interval, where both were in one comparison; `off`: what is wrong with the vendor's result, if anything."""

    us: float
    library: str
    times: float
    ratio: VendorRatio | None
    off: str | None

    @property
    def is_tie(self) -> bool:
        return self.ratio is not None and self.ratio.tie and not self.off

    @property
    def text(self) -> str:
        """Of its result that is off, what is; no ratio then."""
        if self.off:
            return f"its result {self.off}"
        compared = f"tie with {self.library}" if self.is_tie else f"{times(self.times, self.ratio)}× {self.library}"
        return compared if self.ratio is None else f"{compared} ({ends(self.ratio)})"


def times(medians: float, ratio: VendorRatio | None) -> str:
    """`1.083` of samples of the same rounds; `1.08` of two medians."""
    return f"{medians:.2f}" if ratio is None else f"{ratio.ratio:.3f}"


def ends(ratio: VendorRatio) -> str:
    """Of its interval: `1.079–1.088`."""
    return f"{ratio.low:.3f}–{ratio.high:.3f}"


def result_off(max_error: float | None, error_bound: float | None) -> str | None:
    """What is wrong with a result, if anything: above the bound of ours, or no number (null in JSON). Without a bound
    it was not checked."""
    if error_bound is None or (max_error is not None and max_error <= error_bound):
        return None
    return "is not a number" if max_error is None else f"is off by {max_error:.2g}, allowed {error_bound:.2g}"


def vendor_of(winner: WinnerSummary) -> Vendor | None:
    """None where it was not compared with any."""
    if winner.vendor_us is None or not winner.measured_us:
        return None
    off = result_off(winner.vendor_max_error, winner.vendor_error_bound)
    library = winner.vendor_library or ANY_LIBRARY
    return Vendor(winner.vendor_us, library, winner.vendor_us / winner.measured_us, winner.vendor_ratio, off)


def vendor_of_record(record: WinnerRecord) -> Vendor | None:
    """Beside its fastest kernel."""
    best, peer = record.front[0], record.vendor
    if peer is None or not best.measured_us:
        return None
    off = result_off(peer.max_error, peer.error_bound)
    return Vendor(peer.median_us, peer.library, peer.median_us / best.measured_us, best.vendor_ratio, off)
