"""Why a call was refused or failed."""

# Statuses of kernels/include/semmoe_kernels.h.
INVALID, OUT_OF_RANGE, MISALIGNED, TOO_LARGE, DISAGREE, TIMED_OUT, PEER_FAILED, NOT_BUILT, DEVICE = range(1, 10)


class SemmoeError(RuntimeError):
    """Why the library refused or failed; `status` is the number in the header."""

    def __init__(self, status, message):
        super().__init__(message)
        self.status = status
