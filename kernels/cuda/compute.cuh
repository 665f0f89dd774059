// Code that the compute kernels share. They run on one rank's own memory: no ranks meet, and blocks wait for no others.
#pragma once
#include "common.cuh"

// a * b + c, on a GPU rounded once. Where speed counts; `add` and `multiply` never become it.
__device__ inline float fused(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return a * b + c;
#endif
}

__device__ inline u32 bits_of(float v) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(v);
#else
  return shim::bits_of_float(v);
#endif
}

__device__ inline float float_of(u32 bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  return shim::float_of_bits(bits);
#endif
}

// Ends the kernel on numbers that its caller promised otherwise. There is no report word: the host sees the trap.
__device__ inline void trap() {
#ifdef __CUDA_ARCH__
  asm volatile("trap;");
#else
  shim::trap();
#endif
}

// 16 bytes that no block writes during the kernel; zeros if not `inside`, and then nothing is read. `stream` is for what is read once,
// as weights are, `cached` for what other warps of the multiprocessor read as well, as rows of activations are.
#ifdef __CUDA_ARCH__
#define SEMMOE_LOAD16_OR_ZERO(how, from, inside)                                                                   \
  Vec v;                                                                                                           \
  asm volatile(                                                                                                    \
      "{\n.reg .pred inside;\nsetp.ne.u32 inside, %5, 0;\nmov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 " \
      "%3, 0;\n@inside ld.global.nc" how ".v4.u32 {%0,%1,%2,%3}, [%4];\n}"                                         \
      : "=&r"(v.w[0]), "=&r"(v.w[1]), "=&r"(v.w[2]), "=&r"(v.w[3])                                                 \
      : "l"(from), "r"(static_cast<u32>(inside)));                                                                 \
  return v
#else
#define SEMMOE_LOAD16_OR_ZERO(how, from, inside) return (inside) ? shim::load<Vec>(from) : Vec{}
#endif
__device__ inline Vec stream16_or_zero(const void* from, bool inside) {
  SEMMOE_LOAD16_OR_ZERO(".L1::no_allocate", from, inside);
}
__device__ inline Vec cached16_or_zero(const void* from, bool inside) { SEMMOE_LOAD16_OR_ZERO("", from, inside); }
__device__ inline Vec cached16(const void* from) { return cached16_or_zero(from, true); }
