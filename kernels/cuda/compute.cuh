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

// What no block writes during the kernel, and what it reads once: weights.
__device__ inline Vec stream16(const void* from) {
#ifdef __CUDA_ARCH__
  Vec v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
               : "l"(from));
  return v;
#else
  return shim::load<Vec>(from);
#endif
}

// The same for what other warps of the multiprocessor read as well: rows of activations.
__device__ inline Vec cached16(const void* from) {
#ifdef __CUDA_ARCH__
  Vec v;
  asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3]) : "l"(from));
  return v;
#else
  return shim::load<Vec>(from);
#endif
}
