// The parts of a run: fibers, warps, blocks, launches, streams; stores that are not visible yet; and context switches.
#pragma once
#include "scheduler.h"

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <memory>
#include <string>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace shim {
namespace {

constexpr u64 STACK_BYTES = 256 * 1024;
constexpr u32 LANES = 32;
constexpr u64 MOST_TICKS = 1 << 20;
constexpr u64 BLOCKS_AT_ONCE = 2;  // of a launch whose blocks do not wait for one another

Kernel* kernels = nullptr;

struct Block;
struct Launch;

struct DelayedStore {
  void* to;
  u32 bytes;
  u8 of[16];
};

enum State { READY, SPINNING, WAITING, DONE };

// Where a fiber starts, and where it or the scheduler resumes.
struct Context {
  ucontext_t start;
  jmp_buf resume;
  bool has_run = false;
};

struct Fiber {
  Context context;
  u8* stack = nullptr;
  void* fake_stack = nullptr;
  Place place;
  Block* block = nullptr;
  State state = READY;
  u32 round = 0;  // warp operations so far
  bool slow = false;
  bool idle = false;  // waits for its next kernel
  std::vector<DelayedStore> delayed;
};

// A lane's operands of a matrix product.
struct Fragments {
  u32 a[4];
  u32 b[2];
};

struct Warp {
  u64 values[2][LANES];
  Fragments fragments[2][LANES];
  u32 arrived = 0;
  u32 live = LANES;
  char operation = 0;
};

struct Block {
  Launch* launch;
  std::vector<Fiber*> fibers;
  std::vector<Warp> warps;
  std::unique_ptr<u8[]> shared;
  u64 shared_bytes = 0;
  u32 arrived = 0;
  u32 live;
  std::vector<DelayedStore> ordered;  // stores before the last barrier: any thread's release covers them
};

struct Launch {
  const Kernel* kernel;
  const void* params;
  std::vector<std::unique_ptr<Block>> blocks;
  u64 live_fibers = 0;
  const ShimStep* step = nullptr;
  u64 started = 0;  // blocks so far
  bool trapped = false;
};

struct Stream {
  ShimStream* given;
  u64 next = 0;
  u64 held_until = 0;
  std::unique_ptr<Launch> launch;
};

Context main_context;
Fiber* current = nullptr;
std::vector<Fiber*> pool;
std::vector<Fiber*> ready;
std::vector<Fiber*> spinning;
u64 ticks = 0;
bool progress = false;
bool beside_others = false;
u64 random_state = 1;
std::string failure;

u64 random_number() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state * 0x2545f4914f6cdd1dull >> 16;
}
bool one_in(u32 n) { return random_number() % n == 0; }

void fail(const std::string& sentence) {
  if (failure.empty()) failure = sentence;
}

void make_visible(const DelayedStore& store) { std::memcpy(store.to, store.of, store.bytes); }

void make_all_visible(std::vector<DelayedStore>& stores) {
  // Out of order, because nothing guarantees an order.
  while (!stores.empty()) {
    const u64 at = random_number() % stores.size();
    make_visible(stores[at]);
    stores[at] = stores.back();
    stores.pop_back();
  }
}

void maybe_make_one_visible(std::vector<DelayedStore>& stores) {
  if (stores.empty() || !one_in(16)) return;
  const u64 at = random_number() % stores.size();
  make_visible(stores[at]);
  stores.erase(stores.begin() + static_cast<long>(at));
}

#if defined(__SANITIZE_ADDRESS__)
const void* main_stack = nullptr;
size_t main_stack_bytes = 0;
void* main_fake_stack = nullptr;
void leaving_main(Fiber* to) { __sanitizer_start_switch_fiber(&main_fake_stack, to->stack, STACK_BYTES); }
void back_in_main() { __sanitizer_finish_switch_fiber(main_fake_stack, nullptr, nullptr); }
void leaving_fiber(Fiber* from, bool for_good) {
  __sanitizer_start_switch_fiber(for_good ? nullptr : &from->fake_stack, main_stack, main_stack_bytes);
}
void back_in_fiber(Fiber* fiber) { __sanitizer_finish_switch_fiber(fiber->fake_stack, &main_stack, &main_stack_bytes); }
void clean_stack(Fiber* fiber) { __asan_unpoison_memory_region(fiber->stack, STACK_BYTES); }
// The sanitizer takes a jump to another stack for unwinding.
void switch_context(Context& from, Context& to) { swapcontext(&from.start, &to.start); }
#else
void leaving_main(Fiber*) {}
void back_in_main() {}
void leaving_fiber(Fiber*, bool) {}
void back_in_fiber(Fiber*) {}
void clean_stack(Fiber*) {}
// swapcontext sets the signal mask by a system call, which took half of the time; only a fiber's start needs it.
void switch_context(Context& from, Context& to) {
  from.has_run = true;
  if (_setjmp(from.resume) != 0) return;
  if (to.has_run) _longjmp(to.resume, 1);
  setcontext(&to.start);
}
#endif

void to_scheduler(State state, bool for_good = false) {
  Fiber* self = current;
  self->state = state;
  leaving_fiber(self, for_good);
  switch_context(self->context, main_context);
  back_in_fiber(self);
}

}  // namespace
}  // namespace shim
