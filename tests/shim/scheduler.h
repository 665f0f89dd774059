// The shim's input from Rust: streams of steps, one stream per rank, as CUDA streams on P GPUs.
#pragma once
#include "shim.h"

extern "C" {

enum ShimStepKind : u32 {
  SHIM_COPY = 0,    // memcpy(to, from, length)
  SHIM_FILL = 1,    // memset(to, byte, length)
  SHIM_LAUNCH = 2,  // kernel<<<(grid_x, grid_y), threads>>>(params)
  SHIM_HOLD = 3,    // goes on when all others have been stuck or done for `length` ticks
};

struct ShimStep {
  u32 kind;
  u32 grid_x, grid_y, threads;
  const char* kernel;
  const void* params;
  u64 params_bytes;
  void* to;
  const void* from;
  u64 length;
  u32 byte;
  u32 together;  // a launch: its blocks wait for one another, so all of them run at once
};

struct ShimStream {
  const ShimStep* steps;
  u64 count;
  u32 trapped;  // out: a kernel stopped; its later steps were not run
  u32 padding;
};

// 0, or 1 with a sentence in `message`: an unknown kernel, a barrier that can never complete, a step that never ends.
int semmoe_shim_run(ShimStream* streams, u64 count, u64 seed, u32 mutant, char* message, u64 message_bytes);

// The following apply to all later runs.

// Not 0: ranks of other processes take part, so time is the clock's, and waits last as long as the kernels allow.
void semmoe_shim_beside_others(u32 on);

// Omits the barrier or warp barrier at this file and line; null: none. The string must stay valid.
void semmoe_shim_leave_out(const char* file, u32 line);

// Bytes that the last run's 16-byte loads and stores moved.
void semmoe_shim_moved(u64* loaded, u64* stored);
}
