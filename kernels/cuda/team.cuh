// Synchronisation of ranks: signal words, epochs, the timeout.
//
// Each rank owns one `Signals` in memory that all ranks can write. Block b of a rank synchronises with block b of every
// other rank twice: on entry (everything that peers wrote before their kernels may be read, and their buffers may be
// written) and on exit (they have finished reading and writing). Entry and exit have separate words: with one word, a
// rank that waits for the exit would mistake a peer's entry for it. A word contains the epoch (upper half) and, on
// entry, a digest of the call (lower half): ranks that disagree on shapes stop there. Epochs are in device memory and
// are never reset, so a captured graph can be replayed.
#pragma once
#include "common.cuh"

struct Signals {
  u32 epoch[MAX_BLOCKS];  // written by the owner only
  u64 entry[MAX_BLOCKS][MAX_RANKS];
  u64 exit[MAX_BLOCKS][MAX_RANKS];
  u32 counts[MAX_RANKS];  // rows for each rank in the dispatch at hand; written by the owner only
};

struct Team {
  u32 ranks;
  u32 first_rank;  // the rank of blockIdx.y = 0; several ranks share a launch where they share a GPU
  u64 timeout_ns;
  u64* report[MAX_LOCAL];  // host-visible, by blockIdx.y; 0 until a rank stops
  Signals* signals[MAX_RANKS];  // null: that rank's rows are in this GPU's memory, and it is not met
};

// Why a rank stopped: the upper byte of its report, which kernels/cuda/src/error.rs decodes.
enum Stop : u32 {
  STOP_ENTRY_TIMEOUT = 1,
  STOP_EXIT_TIMEOUT = 2,
  STOP_DISAGREE = 3,
  STOP_DESTINATION = 4,
  STOP_ROWS = 5,
  STOP_PERMUTATION = 6,
  STOP_OFFSETS = 7,
  STOP_MOVE = 8,
};

// Report: kind, rank, peer (8 bits each), 8 unused bits, then a number: the epoch, or the index of the invalid item.
__device__ inline void stop(u64* report, Stop kind, u32 rank, u32 peer, u32 number) {
  const u64 code = static_cast<u64>(kind) << 56 | static_cast<u64>(rank) << 48 | static_cast<u64>(peer) << 40 | number;
#ifdef __CUDA_ARCH__
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(report), "l"(code) : "memory");
  __threadfence_system();
  asm volatile("trap;");
#else
  *report = code;
  shim::trap();
#endif
}

__device__ inline void store_release(u64* word, u64 value) {
#ifdef __CUDA_ARCH__
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
#else
  shim::store_release(word, value);
#endif
}

__device__ inline u64 load_acquire(const u64* word) {
#ifdef __CUDA_ARCH__
  u64 value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
#else
  return shim::load_acquire(word);
#endif
}

__device__ inline u64 now_ns() {
#ifdef __CUDA_ARCH__
  u64 now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
#else
  return shim::now_ns();
#endif
}

__device__ inline void spin() {
#ifndef __CUDA_ARCH__
  shim::spin();
#endif
}

__device__ inline u32 mix(u32 digest, u32 value) { return (digest ^ value) * 0x01000193u; }

// Digest of the values on which all ranks must agree.
__device__ inline u32 shape_digest(u32 op, u32 tokens, u32 hidden, u32 element) {
  return mix(mix(mix(mix(mix(0x811c9dc5u, op), tokens), hidden), element), gridDim.x);
}

// One block's part in the synchronisation of all ranks.
struct Meeting {
  const Team& team;
  u32 rank;
  u32 epoch;

  __device__ explicit Meeting(const Team& t)
      : team(t), rank(t.first_rank + blockIdx.y), epoch(t.signals[rank]->epoch[blockIdx.x] + 1) {}

  __device__ u64* report() const { return team.report[blockIdx.y]; }

  __device__ bool meets(u32 peer) const { return peer < team.ranks && team.signals[peer] != nullptr; }

  __device__ void wait(const u64* word, u32 peer, Stop late, bool same_call, u32 digest) const {
    const u32 awaited = SEMMOE_MUTANT(PREVIOUS_EPOCH) ? epoch - 1 : epoch;
    const u64 begun = now_ns();
    for (;;) {
      const u64 seen = load_acquire(word);
      const u32 theirs = static_cast<u32>(seen >> 32);
      // Epochs wrap around: one is reached when it is not behind.
      if (static_cast<int>(theirs - awaited) >= 0) {
        if (same_call && theirs == epoch && static_cast<u32>(seen) != digest) stop(report(), STOP_DISAGREE, rank, peer, epoch);
        return;
      }
      if (now_ns() - begun > team.timeout_ns) stop(report(), late, rank, peer, epoch);
      spin();
    }
  }

  // Signals entry and waits; everything that peers wrote before their kernels is visible afterwards.
  __device__ void enter(u32 digest) const {
    const u32 peer = threadIdx.x;
    if (meets(peer)) {
      store_release(&team.signals[peer]->entry[blockIdx.x][rank], static_cast<u64>(epoch) << 32 | digest);
      if (!SEMMOE_MUTANT(NO_ENTRY_WAIT)) {
        wait(&team.signals[rank]->entry[blockIdx.x][peer], peer, STOP_ENTRY_TIMEOUT, true, digest);
      }
    }
    // The other threads continue only when the waiting threads are done.
    if (!SEMMOE_MUTANT(NO_ENTRY_BARRIER)) __syncthreads();
  }

  // Signals that this block has finished reading and writing, and waits until every peer's block has.
  __device__ void leave() const {
    // The release below covers the whole block's stores only after this barrier.
    if (!SEMMOE_MUTANT(NO_EXIT_BARRIER)) __syncthreads();
    const u32 peer = threadIdx.x;
    if (meets(peer)) {
      u64* theirs = &exit_words(team.signals[peer])[rank];
      const u64 value = static_cast<u64>(epoch) << 32;
      if (SEMMOE_MUTANT(RELAXED_EXIT)) {
        *theirs = value;
      } else {
        store_release(theirs, value);
      }
      if (!SEMMOE_MUTANT(NO_EXIT_WAIT)) {
        wait(&exit_words(team.signals[rank])[peer], peer, STOP_EXIT_TIMEOUT, false, 0);
      }
    }
    if (threadIdx.x == 0) team.signals[rank]->epoch[blockIdx.x] = epoch;
  }

  __device__ u64* exit_words(Signals* signals) const {
    return SEMMOE_MUTANT(ONE_WORD) ? signals->entry[blockIdx.x] : signals->exit[blockIdx.x];
  }
};
