// SRS and SAG through NVLink SHARP (sm_90 and newer, if the host found multicast support): the switch adds the values
// of all ranks at one address, and writes one store to all of them. Per rank, N / P come in and N / P go out, instead
// of (P-1)/P N.
//
// The switch adds in its own order, so tests compare sums with a tolerance. Without a switch (the shim) ranks are added
// in order.
#include "gather.cuh"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

template <class T>
__device__ inline Vec load_reduced(const ReduceParams& p, u64 element);

#ifdef __CUDA_ARCH__
#define SEMMOE_LD_REDUCE(T, type)                                                                                     \
  template <>                                                                                                         \
  __device__ inline Vec load_reduced<T>(const ReduceParams& p, u64 element) {                                         \
    Vec v;                                                                                                            \
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add" type " {%0,%1,%2,%3}, [%4];"                             \
                 : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])                                             \
                 : "l"(static_cast<const T*>(p.multicast) + element)                                                  \
                 : "memory");                                                                                         \
    return v;                                                                                                         \
  }
SEMMOE_LD_REDUCE(F16, ".acc::f32.v4.f16x2")
SEMMOE_LD_REDUCE(Bf16, ".acc::f32.v4.bf16x2")
template <>
__device__ inline Vec load_reduced<float>(const ReduceParams& p, u64 element) {
  Lanes<float> sum;
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(sum.of[0]), "=f"(sum.of[1]), "=f"(sum.of[2]), "=f"(sum.of[3])
               : "l"(static_cast<const float*>(p.multicast) + element)
               : "memory");
  return pack<float>(sum);
}
#else
template <class T>
__device__ inline Vec load_reduced(const ReduceParams& p, u64 element) {
  return pack<T>(sum_any<T>(p.parts, p.team.ranks, element));
}
#endif

template <class T>
__device__ inline void reduce_scatter_nvls(const ReduceParams& p) {
  const Meeting meeting(p.team);
  meeting.enter(shape_digest(OP_REDUCE_SCATTER, p.tokens, p.hidden, sizeof(T) + 1));
  const Rows rows(meeting, p.offsets[blockIdx.y], p.tokens, p.capacity);
  reduce_rows<T, 4>(
      p, meeting, rows, [&](u64 element) { return load_reduced<T>(p, element); }, [](const Vec& v) { return unpack<T>(v); });
  meeting.leave();
}

template <class T>
__device__ inline void allgather_nvls(const GatherParams& p) {
  gather<T>(p, 1, [&](u64 element, const Vec& v) {
#ifdef __CUDA_ARCH__
    const Lanes<float> bits = unpack<float>(v);
    asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(static_cast<T*>(p.multicast) + element),
                 "f"(bits.of[0]), "f"(bits.of[1]), "f"(bits.of[2]), "f"(bits.of[3])
                 : "memory");
#else
    for (u32 peer = 0; peer < p.team.ranks; ++peer) push16(static_cast<T*>(p.out[peer]) + element, v);
#endif
  });
}

SEMMOE_KERNEL(semmoe_srs_nvls_f32, ReduceParams, COLLECTIVE_THREADS) { reduce_scatter_nvls<float>(p); }
SEMMOE_KERNEL(semmoe_srs_nvls_f16, ReduceParams, COLLECTIVE_THREADS) { reduce_scatter_nvls<F16>(p); }
SEMMOE_KERNEL(semmoe_srs_nvls_bf16, ReduceParams, COLLECTIVE_THREADS) { reduce_scatter_nvls<Bf16>(p); }
SEMMOE_KERNEL(semmoe_sag_nvls_4, GatherParams, COLLECTIVE_THREADS) { allgather_nvls<float>(p); }
SEMMOE_KERNEL(semmoe_sag_nvls_2, GatherParams, COLLECTIVE_THREADS) { allgather_nvls<Bf16>(p); }

#endif
