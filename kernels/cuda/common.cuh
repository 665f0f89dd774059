// Code shared by all kernels: element types, 16-byte accesses, the division of work over warps.
//
// No CUDA header is included, so NVRTC needs none; g++ compiles the same text after tests/shim/shim.h.
#pragma once

#ifndef SEMMOE_SHIM
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
// A kernel with one parameter struct, which is read in place: no copy, and arrays in it may be indexed. A
// multiprocessor can run COLLECTIVE_THREADS threads of it, or one larger block.
#define SEMMOE_KERNEL(name, Params, threads)                                                                            \
  extern "C" __global__ void __launch_bounds__(threads, threads < COLLECTIVE_THREADS ? COLLECTIVE_THREADS / threads : 1) \
      name(const __grid_constant__ Params p)
#define SEMMOE_SHARED(Type, name) __shared__ Type name
// The shim turns these into switches; on a GPU no synchronisation can be omitted.
#define SEMMOE_MUTANT(kind) false
#endif

// Limits that the host checks too (kernels/cuda/src/params.rs).
constexpr u32 MAX_RANKS = 64;
constexpr u32 MAX_LOCAL = 8;
constexpr u32 MAX_BLOCKS = 256;
constexpr u32 WARP = 32;
constexpr u32 ALL_LANES = 0xffffffffu;
constexpr u32 COLLECTIVE_THREADS = 512;
constexpr u32 SORT_THREADS = 1024;

struct Bf16 {
  u16 bits;
};
struct F16 {
  u16 bits;
};

// 16 bytes, the size of one load or store.
struct alignas(16) Vec {
  u32 w[4];
};

__device__ inline u32 lane_id() { return threadIdx.x % WARP; }
__device__ inline u32 warp_id() { return threadIdx.x / WARP; }

// Loads without the read-only cache, because peers write this memory between kernels.
__device__ inline Vec load16(const void* from) {
#ifdef __CUDA_ARCH__
  Vec v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
               : "l"(from)
               : "memory");
  return v;
#else
  return shim::load<Vec>(from);
#endif
}

__device__ inline void store16(void* to, const Vec& v) {
#ifdef __CUDA_ARCH__
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3])
               : "memory");
#else
  shim::store(to, v);
#endif
}

// Stores 16 bytes to another rank's memory. The shim delays the store until a release, as a weak memory model may.
__device__ inline void push16(void* to, const Vec& v) {
#ifdef __CUDA_ARCH__
  store16(to, v);
#else
  shim::push(to, &v, sizeof v);
#endif
}

template <class T>
__device__ inline void push_element(T* to, T v) {
#ifdef __CUDA_ARCH__
  *to = v;
#else
  shim::push(to, &v, sizeof v);
#endif
}

// Conversions: to f32 exactly, from f32 to nearest, ties to even. A NaN becomes the one with all bits but the sign set.
__device__ inline float to_float(float v) { return v; }
__device__ inline float to_float(Bf16 v) {
  const u32 bits = static_cast<u32>(v.bits) << 16;
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  return shim::float_of_bits(bits);
#endif
}
__device__ inline float to_float(F16 v) {
#ifdef __CUDA_ARCH__
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v.bits));
  return f;
#else
  return shim::float_of_half(v.bits);
#endif
}

template <class T>
__device__ T from_float(float v);
template <>
__device__ inline float from_float<float>(float v) {
  // The sum of a single rank was never added to anything, so a NaN still has its original bits.
#ifdef __CUDA_ARCH__
  return v != v ? __uint_as_float(0x7fffffffu) : v;
#else
  return v != v ? shim::float_of_bits(0x7fffffffu) : v;
#endif
}
template <>
__device__ inline Bf16 from_float<Bf16>(float v) {
#ifdef __CUDA_ARCH__
  Bf16 b;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(b.bits) : "f"(v));
  return b;
#else
  return Bf16{shim::bf16_of_float(v)};
#endif
}
template <>
__device__ inline F16 from_float<F16>(float v) {
#ifdef __CUDA_ARCH__
  F16 h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h.bits) : "f"(v));
  return h;
#else
  return F16{shim::half_of_float(v)};
#endif
}

// Never contracted to a fused multiply-add: the reference rounds after each operation.
__device__ inline float add(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}
__device__ inline float multiply(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

// The elements of 16 bytes, as f32.
template <class T>
struct Lanes {
  static constexpr u32 COUNT = 16 / sizeof(T);
  float of[COUNT];
};

template <class T>
__device__ inline Lanes<T> unpack(const Vec& v);
template <>
__device__ inline Lanes<float> unpack<float>(const Vec& v) {
  Lanes<float> out;
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
#ifdef __CUDA_ARCH__
    out.of[i] = __uint_as_float(v.w[i]);
#else
    out.of[i] = shim::float_of_bits(v.w[i]);
#endif
  }
  return out;
}
template <class T>
__device__ inline Lanes<T> unpack_halves(const Vec& v) {
  Lanes<T> out;
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    out.of[2 * i] = to_float(T{static_cast<u16>(v.w[i])});
    out.of[2 * i + 1] = to_float(T{static_cast<u16>(v.w[i] >> 16)});
  }
  return out;
}
template <>
__device__ inline Lanes<Bf16> unpack<Bf16>(const Vec& v) {
  return unpack_halves<Bf16>(v);
}
template <>
__device__ inline Lanes<F16> unpack<F16>(const Vec& v) {
  return unpack_halves<F16>(v);
}

template <class T>
__device__ inline Vec pack(const Lanes<T>& lanes);
template <>
__device__ inline Vec pack<float>(const Lanes<float>& lanes) {
  Vec v;
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
#ifdef __CUDA_ARCH__
    v.w[i] = __float_as_uint(from_float<float>(lanes.of[i]));
#else
    v.w[i] = shim::bits_of_float(from_float<float>(lanes.of[i]));
#endif
  }
  return v;
}
template <class T>
__device__ inline Vec pack_halves(const Lanes<T>& lanes) {
  Vec v;
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    const u32 low = from_float<T>(lanes.of[2 * i]).bits;
    const u32 high = from_float<T>(lanes.of[2 * i + 1]).bits;
    v.w[i] = low | high << 16;
  }
  return v;
}
template <>
__device__ inline Vec pack<Bf16>(const Lanes<Bf16>& lanes) {
  return pack_halves<Bf16>(lanes);
}
template <>
__device__ inline Vec pack<F16>(const Lanes<F16>& lanes) {
  return pack_halves<F16>(lanes);
}

template <class T>
__device__ inline void accumulate(Lanes<T>& sum, const Vec& v) {
  const Lanes<T> more = unpack<T>(v);
#pragma unroll
  for (u32 i = 0; i < Lanes<T>::COUNT; ++i) sum.of[i] = add(sum.of[i], more.of[i]);
}

// Address of an element; T is the element type of the matrix.
template <class T>
__device__ inline const T* row_at(const void* matrix, u64 row, u32 hidden) {
  return static_cast<const T*>(matrix) + row * hidden;
}
template <class T>
__device__ inline T* row_at(void* matrix, u64 row, u32 hidden) {
  return static_cast<T*>(matrix) + row * hidden;
}

// Rows are split into segments of 32 lanes x UNROLL vectors, which warps process in turn, so few long rows and many
// short ones both fill the grid.
template <class T, u32 UNROLL>
struct Segments {
  u32 vectors;  // vectors in a row
  u32 per_row;
  u64 units;

  __device__ Segments(u32 rows, u32 hidden) {
    vectors = hidden / Lanes<T>::COUNT;
    per_row = (vectors + WARP * UNROLL - 1) / (WARP * UNROLL);
    units = static_cast<u64>(rows) * per_row;
  }
  __device__ static u64 first() { return blockIdx.x * (blockDim.x / WARP) + warp_id(); }
  __device__ static u64 stride() { return gridDim.x * (blockDim.x / WARP); }
  __device__ u32 row(u64 unit) const { return static_cast<u32>(unit / per_row); }
  // Returns this lane's j-th vector; none exists at or past `vectors`.
  __device__ u32 column(u64 unit, u32 j) const {
    return static_cast<u32>(unit % per_row) * (WARP * UNROLL) + j * WARP + lane_id();
  }
};

// Whether rows can be accessed in units of 16 bytes. Bases are 16-byte aligned: the host rejects others.
template <class T>
__device__ inline bool whole_vectors(u32 hidden) {
  return hidden % Lanes<T>::COUNT == 0;
}
