// Lets a C++ compiler build the unmodified CUDA sources: built-ins, warp operations, and the permitted behaviour of a
// GPU's memory.
//
// One fiber per CUDA thread, all on one OS thread, scheduled by a seeded generator: runs with equal seeds are
// identical. See scheduler.cpp.
#pragma once
#include <cmath>
#include <cstring>

#define SEMMOE_SHIM 1
#define __device__

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

namespace shim {

// Each omits or weakens one piece of synchronisation; a test must then fail. The numbers match src/run.rs.
enum Mutant : u32 {
  NONE,
  NO_ENTRY_WAIT,
  NO_ENTRY_BARRIER,
  NO_EXIT_WAIT,
  NO_EXIT_BARRIER,
  PREVIOUS_EPOCH,
  ONE_WORD,
  RELAXED_EXIT,
  NO_SORT_BARRIER,
};

struct Dim {
  u32 x, y, z;
};
struct Place {
  Dim thread, block, threads, grid;
};

// The running CUDA thread.
extern Place here;
extern Mutant mutant;

// An omitted barrier: its file and line; null for none.
extern const char* left_out_file;
extern u32 left_out_line;
inline bool left_out(const char* file, u32 line) {
  return line == left_out_line && left_out_file != nullptr && std::strcmp(file, left_out_file) == 0;
}

// Bytes of the 16-byte accesses since the run began.
extern u64 loaded_bytes;
extern u64 stored_bytes;

// Lets other fibers run first.
void pause();
// The thread waits for another block: it runs again when no other can make progress.
void spin();
void barrier();
// Deposits a value and waits for all lanes; `of_lane` then reads theirs.
void meet_lanes(u32 mask, char operation, u64 value);
u64 of_lane(u32 lane);
// c += A B of a warp, bf16 in and f32 out: `mma.sync.aligned.m16n8k16.row.col`, with the lanes' fragments as PTX gives them.
void mma(float* c, const u32* a, const u32* b);
void* shared_memory(u64 bytes);
// A store that others may see late and out of order, until this thread or, after a barrier, its block releases.
void push(void* to, const void* from, u32 bytes);
void store_release(u64* word, u64 value);
u64 load_acquire(const u64* word);
[[noreturn]] void trap();
u64 now_ns();
[[noreturn]] void misaligned(const void* address);

template <class V>
V load(const void* from) {
  pause();
  loaded_bytes += sizeof(V);
  if (reinterpret_cast<u64>(from) % sizeof(V) != 0) misaligned(from);
  return *static_cast<const V*>(from);
}
template <class V>
void store(void* to, const V& v) {
  pause();
  stored_bytes += sizeof(V);
  if (reinterpret_cast<u64>(to) % sizeof(V) != 0) misaligned(to);
  *static_cast<V*>(to) = v;
}

inline float float_of_bits(u32 bits) {
  float v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}
inline u32 bits_of_float(float v) {
  u32 bits;
  std::memcpy(&bits, &v, sizeof bits);
  return bits;
}
inline float square_root(float v) { return std::sqrt(v); }

inline u16 bf16_of_float(float v) {
  const u32 bits = bits_of_float(v);
  if (v != v) return 0x7fff;
  return static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Deliberately independent of the reference: rounds scaled numbers, not bits.
inline u16 half_of_float(float v) {
  if (v != v) return 0x7fff;
  const u16 sign = std::signbit(v) ? 0x8000 : 0;
  const float size = std::fabs(v);
  if (size >= 65520.0f) return sign | 0x7c00;
  if (size == 0.0f) return sign;
  int exponent = 0;
  std::frexp(size, &exponent);
  // The unit in the last place of a half: 11 significant bits, but never below 2^-24.
  const int unit = exponent - 11 < -24 ? -24 : exponent - 11;
  const u32 steps = static_cast<u32>(std::nearbyint(std::ldexp(size, -unit)));
  if (unit == -24) return sign | static_cast<u16>(steps);
  return sign | static_cast<u16>((static_cast<u32>(unit + 24) << 10) + steps);
}
inline float float_of_half(u16 bits) {
  const int exponent = bits >> 10 & 31;
  const int mantissa = bits & 1023;
  float size = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                             : std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
  if (exponent == 31) size = mantissa == 0 ? INFINITY : NAN;
  return bits & 0x8000 ? -size : size;
}

struct Kernel {
  Kernel(const char* name, void (*body)(const void*), u64 params, u32 most_threads);
  const char* name;
  void (*body)(const void*);
  u64 params;
  u32 most_threads;
  Kernel* next;
};

}  // namespace shim

#define threadIdx (shim::here.thread)
#define blockIdx (shim::here.block)
#define blockDim (shim::here.threads)
#define gridDim (shim::here.grid)

#define __syncthreads() (shim::left_out(__FILE__, __LINE__) ? (void)0 : shim::barrier())
#define __syncwarp(mask) (shim::left_out(__FILE__, __LINE__) ? (void)0 : shim::meet_lanes(mask, 's', 0))
template <class V>
V __shfl_up_sync(u32 mask, V value, u32 delta) {
  static_assert(sizeof(V) == 4, "32-bit values only");
  u32 bits;
  std::memcpy(&bits, &value, 4);
  const u32 lane = threadIdx.x % 32;
  shim::meet_lanes(mask, 'u', bits);
  bits = static_cast<u32>(shim::of_lane(lane >= delta ? lane - delta : lane));
  std::memcpy(&value, &bits, 4);
  return value;
}
template <class V>
V __shfl_xor_sync(u32 mask, V value, u32 other) {
  static_assert(sizeof(V) == 4, "32-bit values only");
  u32 bits;
  std::memcpy(&bits, &value, 4);
  const u32 lane = threadIdx.x % 32;
  shim::meet_lanes(mask, 'x', bits);
  bits = static_cast<u32>(shim::of_lane(lane ^ other));
  std::memcpy(&value, &bits, 4);
  return value;
}
inline u32 __ballot_sync(u32 mask, u64 predicate) {
  shim::meet_lanes(mask, 'b', predicate != 0);
  u32 votes = 0;
  for (u32 lane = 0; lane < 32; ++lane) votes |= static_cast<u32>(shim::of_lane(lane)) << lane;
  return votes;
}
inline u32 __match_any_sync(u32 mask, u32 value) {
  shim::meet_lanes(mask, 'm', value);
  u32 same = 0;
  for (u32 lane = 0; lane < 32; ++lane) same |= static_cast<u32>(shim::of_lane(lane) == value) << lane;
  return same;
}
// The maximum or minimum over all lanes.
inline u32 __reduce_max_sync(u32 mask, u32 value) {
  shim::meet_lanes(mask, 'M', value);
  u32 most = value;
  for (u32 lane = 0; lane < 32; ++lane) {
    if (shim::of_lane(lane) > most) most = static_cast<u32>(shim::of_lane(lane));
  }
  return most;
}
inline u32 __reduce_min_sync(u32 mask, u32 value) {
  shim::meet_lanes(mask, 'n', value);
  u32 least = value;
  for (u32 lane = 0; lane < 32; ++lane) {
    if (shim::of_lane(lane) < least) least = static_cast<u32>(shim::of_lane(lane));
  }
  return least;
}
// Threads are fibers of one OS thread: nothing comes between.
inline u32 atomicAdd(u32* to, u32 v) {
  const u32 before = *to;
  *to += v;
  return before;
}
inline int __popc(u32 v) { return __builtin_popcount(v); }
inline int __ffs(u32 v) { return __builtin_ffs(static_cast<int>(v)); }
inline int __ffsll(long long v) { return __builtin_ffsll(v); }

#define SEMMOE_KERNEL(name, Params, most_threads)                                                                     \
  static void name(const Params& p);                                                                                  \
  static void name##_of(const void* p) { name(*static_cast<const Params*>(p)); }                                      \
  static shim::Kernel name##_kernel(#name, name##_of, sizeof(Params), most_threads);                                  \
  static void name(const Params& p)
#define SEMMOE_SHARED(Type, name) Type& name = *static_cast<Type*>(shim::shared_memory(sizeof(Type)))
#define SEMMOE_MUTANT(kind) (shim::mutant == shim::kind)
