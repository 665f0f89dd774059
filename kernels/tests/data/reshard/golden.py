#!/usr/bin/env python3
"""Writes golden.txt: every rank's buffer before and after EP -> TP, as reshard.py (beside this file) leaves it.

    pip install numpy && python3 kernels/tests/data/reshard/golden.py > kernels/tests/data/reshard/golden.txt

Weights are a function of their index, so that the Rust test can make the same ones; what is unused is poisoned. reshard.py puts gate and up of
all experts before down of all experts; here the arrays of each expert lie together, as its second product reads on where the first one ends.
Columns: N P E I H K, elements of a buffer, rank, FNV-1a of its bytes under EP, under TP.
"""
import numpy as np
import reshard

SHAPES = [
    (1, 8, 16, 16, 6, 5),
    (2, 4, 16, 8, 6, 4),
    (2, 4, 24, 10, 5, 4),
    (1, 4, 8, 7, 3, 6),
    (3, 2, 12, 9, 4, 3),
    (2, 4, 8, 3, 2, 3),
]


class Indexed:
    """In the place of numpy's generator: gate and up first, then down."""

    def __init__(self, seed):
        self.array = 0

    def integers(self, low, high, shape, dtype):
        index = np.arange(np.prod(shape), dtype=np.uint64) + np.uint64(self.array << 32)
        self.array += 1
        return ((index * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(48)).astype(dtype).reshape(shape)


class ByExpert(reshard.Sim):
    """Slots that hold one whole expert after the other; the order of all steps is reshard.py's."""

    def put(self, rank, lo, up, down, end):
        rows = np.concatenate([up.reshape(len(up), -1), down.reshape(len(down), -1)], axis=1)
        self.buf[rank][lo : lo + rows.size] = rows.reshape(-1)
        self.buf[rank][lo + rows.size : end] = reshard.POISON

    def get(self, rank, lo, experts, width):
        rows = self.buf[rank][lo : lo + experts * 3 * width * self.H].reshape(experts, -1)
        up, down = np.split(rows, [2 * width * self.H], axis=1)
        return up.reshape(experts, 2, width, self.H), down.reshape(experts, self.H, width)

    def put_ep(self, rank, layer, up, down):
        lo = self.off_ep(layer)
        self._claim(rank, layer, "EP", lo, lo + self.X)
        self.put(rank, lo, up, down, lo + self.X)

    def get_ep(self, rank, layer):
        assert self.live[rank][layer][0] == "EP"
        return self.get(rank, self.off_ep(layer), self.L, self.I)

    def put_tp(self, rank, layer, up, down):
        lo = self.off_tp(layer)
        self._claim(rank, layer, "TP", lo, lo + self.T)
        self.put(rank, lo, up, down, lo + self.T)

    def get_tp(self, rank, layer):
        assert self.live[rank][layer][0] == "TP"
        return self.get(rank, self.off_tp(layer), self.E, self.w[rank % self.P])


def fnv(buffer):
    value = 0xCBF29CE484222325
    for byte in buffer.astype("<u2").tobytes():
        value = ((value ^ byte) * 0x100000001B3) & (2**64 - 1)
    return value


np.random.default_rng = Indexed
for shape in SHAPES:
    sim = ByExpert(*shape)
    before = [fnv(buffer) for buffer in sim.buf]
    sim.to_tp()
    sim.check_tp()
    after = [fnv(buffer) for buffer in sim.buf]
    sim.to_ep()
    assert before == [fnv(buffer) for buffer in sim.buf]
    for rank, (ep, tp) in enumerate(zip(before, after)):
        print(*shape, sim.cap, rank, f"{ep:016x} {tp:016x}")
