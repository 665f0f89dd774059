// Code shared by the compute kernels. They use one rank's own memory: ranks do not synchronise, and blocks do not wait
// for others.
#pragma once
#include "common.cuh"

// In a row's list of pairs: no further pair.
constexpr u32 NO_PAIR = 0xffffffffu;

// a * b + c, rounded once on a GPU. For speed; `add` and `multiply` never become a fused operation.
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

// Ends the kernel if numbers violate its contract. There is no report word: the host detects the trap.
__device__ inline void trap() {
#ifdef __CUDA_ARCH__
  asm volatile("trap;");
#else
  shim::trap();
#endif
}

// Loads 16 bytes that no block writes during the kernel; if not `inside`, returns zeros without reading. `stream` is
// for data that is read once, such as weights; `cached` is for data that other warps of the multiprocessor also read,
// such as rows of activations.
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
