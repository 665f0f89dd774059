"""Writes sr.golden: what the reference program of the codec makes of weights that tests can make again.

    python3 sr_golden.py > sr.golden        # NumPy 2.4.6

shared, enc, dec and k_for are the reference program's, word for word. A line is a case: experts, n, ratio, bytes of an index, then
indices, values (bits of f16) and, where n is small, the shared expert and the decoded one.
"""
import numpy as np


def shared(W): return W.astype(np.float32).mean(0).astype(np.float16)
def enc(w,S,k):
    r=w.astype(np.float32)-S.astype(np.float32)
    o=np.lexsort((np.arange(r.size),-np.abs(r)))[:k]; idx=np.sort(o).astype(np.uint32)  # ties -> lowest index
    return idx, r[idx].astype(np.float16)
def dec(S,idx,val):
    o=S.copy(); o[idx]=(S[idx].astype(np.float32)+val.astype(np.float32)).astype(np.float16); return o
def k_for(n,cr,ib,vb=2,wb=2): return int(n*wb//(cr*(vb+ib)))


def weights(experts, n, step):
    """Exact in f16; with few different values, so that many residuals have the same magnitude."""
    e, i = np.arange(experts)[:, None], np.arange(n)[None, :]
    return (((i * 7919 + e * 104729 + (i // 13) * e * 31) % step - step // 2) / 512).astype(np.float16)


def words(values): return ",".join(str(int(v)) for v in values)


for experts, n, ratio, index, step in [(5, 600, 5, 2, 2003), (3, 600, 2, 4, 61), (4, 577, 50, 2, 2003), (3, 70000, 50, 4, 2003), (3, 140001, 50, 2, 2003)]:
    W = weights(experts, n, step)
    S = shared(W)
    idx, val = enc(W[1], S, k_for(n, ratio, index))
    line = [str(experts), str(n), str(ratio), str(index), str(step), words(idx), words(val.view(np.uint16))]
    if n < 1000:
        line += [words(S.view(np.uint16)), words(dec(S, idx, val).view(np.uint16))]
    print(" ".join(line))
