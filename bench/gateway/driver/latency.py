"""Percentiles of latency where the best router is busy and still keeps up: requests arrive at random, independent of the answers."""

import contest
from peers import ROUTERS

# A rate is sustained if nearly all of it is answered in time.
LEAST_ANSWERED = 0.97
MOST_P99_US = 100_000
# Rates to try: shares of the closed loop's peak, in geometric steps.
FIRST, STEP, LAST = 0.1, 1.12, 1.2
# Share of the peak found.
SHARE = 0.8


def keeps_up(everyone, contestant, rate):
    figures = everyone.client(contestant.address, ["open", str(rate)])
    return figures["requests_per_second"] >= LEAST_ANSWERED * rate and figures["p99_us"] <= MOST_P99_US


def peak(everyone, contestant, closed_peak):
    """The highest rate that it sustains; it may fail one rate by chance, but not two in a row."""
    rate, found, failed = FIRST * closed_peak, 0.0, 0
    while rate <= LAST * closed_peak and failed < 2:
        if keeps_up(everyone, contestant, rate):
            found, failed = rate, 0
        else:
            failed += 1
        rate *= STEP
    everyone.say(f"  {contestant.name} keeps up with {found:.0f}/s")
    return found


def measure(everyone, closed_peaks):
    """(the best router, its peak in the open loop, figures of each round at 80% of it), or nothing where there is no router."""
    peaks = {}
    for contestant in everyone.contestants:
        if contestant.name in ROUTERS:
            closed_peak = contest.median(closed_peaks[contestant.name], "requests_per_second")
            peaks[contestant.name] = peak(everyone, contestant, closed_peak)
    router = max(peaks, key=peaks.get, default=None)
    if not router or not peaks[router]:
        return None
    rate = SHARE * peaks[router]
    everyone.say(f"latency at {rate:.0f} requests/s")
    return router, peaks, rate, everyone.rounds(["open", str(rate)])


def tables(router, peaks, rate, results):
    title = f"at {rate:.0f} requests/s arriving at random, 80% of what {router} keeps up with ({peaks[router]:.0f}/s)"
    keys = (("p50_us", "p50"), ("p99_us", "p99"))
    return [contest.table(f"{name} {title}", results, key, f"{name}, us", router=router) for key, name in keys]
