// One rank's own rows: elements of one row at a time, in units of 16 bytes if rows are whole vectors, and sums over
// threads in a fixed order.
//
// An index out of range gives a row of NaN without an access, so it cannot pass for a result, and the context survives.
#pragma once
#include "compute.cuh"

constexpr u32 ROW_THREADS = 256;

// Prefetches a line of 128 bytes.
__device__ inline void prefetch(const void* from) {
#ifdef __CUDA_ARCH__
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
#else
  static_cast<void>(from);
#endif
}

__device__ inline float not_a_number() {
#ifdef __CUDA_ARCH__
  return __uint_as_float(0x7fffffffu);
#else
  return shim::float_of_bits(0x7fffffffu);
#endif
}
__device__ inline float minus_infinity() {
#ifdef __CUDA_ARCH__
  return __uint_as_float(0xff800000u);
#else
  return shim::float_of_bits(0xff800000u);
#endif
}

// A unit of a row is the data of one access.
template <class T>
struct ByVector {
  typedef T Element;
  typedef Lanes<T> Values;
  static constexpr u32 COUNT = Lanes<T>::COUNT;

  __device__ static Values load(const T* row, u32 unit) { return unpack<T>(load16(row + unit * COUNT)); }
  __device__ static void store(T* row, u32 unit, const Values& values) { store16(row + unit * COUNT, pack<T>(values)); }
  __device__ static Values rounded(const Values& values) { return unpack<T>(pack<T>(values)); }
  // Returns as many f32 numbers as a unit has elements.
  __device__ static Values floats(const float* row, u32 unit) {
    Values values;
#pragma unroll
    for (u32 i = 0; i < COUNT / 4; ++i) {
      const Lanes<float> four = unpack<float>(load16(row + unit * COUNT + 4 * i));
#pragma unroll
      for (u32 j = 0; j < 4; ++j) values.of[4 * i + j] = four.of[j];
    }
    return values;
  }
};
template <class T>
struct ByElement {
  typedef T Element;
  struct Values {
    float of[1];
  };
  static constexpr u32 COUNT = 1;

  __device__ static Values load(const T* row, u32 unit) { return {{to_float(row[unit])}}; }
  __device__ static void store(T* row, u32 unit, const Values& values) { row[unit] = from_float<T>(values.of[0]); }
  __device__ static Values rounded(const Values& values) { return {{to_float(from_float<T>(values.of[0]))}}; }
  __device__ static Values floats(const float* row, u32 unit) { return {{row[unit]}}; }
};

template <class Access>
__device__ inline typename Access::Values all_of(float value) {
  typename Access::Values values;
#pragma unroll
  for (u32 i = 0; i < Access::COUNT; ++i) values.of[i] = value;
  return values;
}

// Returns the sum over a warp's lanes to all of them.
__device__ inline float sum_lanes(float value) {
#pragma unroll
  for (u32 step = 1; step < WARP; step *= 2) value = add(value, __shfl_xor_sync(ALL_LANES, value, step));
  return value;
}

// Returns this thread's unit; blockIdx.y is the row.
__device__ inline u32 unit_in_row() { return blockIdx.x * blockDim.x + threadIdx.x; }

__device__ inline float sigmoid(float v) { return 1.0f / add(1.0f, expf(-v)); }
