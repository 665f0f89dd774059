// Runs streams of kernels: every CUDA thread is a fiber, every choice comes from the seed.
//
// A thread runs until it waits (barrier, warp, spin) or until a load or store lets others in between, at random. When none but spinning
// threads are left, all of them look again: one such round without progress is a tick, the unit of the kernels' clock. Time-outs are
// thus exact: they fire when, and only when, nothing moves any more.
#include "scheduler.h"

#include <sched.h>
#include <time.h>

#include <cstdio>

#include "fibers.h"

namespace shim {

Place here;
Mutant mutant = NONE;
const char* left_out_file = nullptr;
u32 left_out_line = 0;
u64 loaded_bytes = 0;
u64 stored_bytes = 0;

namespace {

void wake(Fiber* fiber) {
  fiber->state = READY;
  ready.push_back(fiber);
}

void complete_barrier(Block& block) {
  block.arrived = 0;
  for (Fiber* fiber : block.fibers) {
    block.ordered.insert(block.ordered.end(), fiber->delayed.begin(), fiber->delayed.end());
    fiber->delayed.clear();
    if (fiber->state == WAITING) wake(fiber);
  }
}

void fiber_main() {
  Fiber* self = current;
  back_in_fiber(self);
  for (;;) {
    self->idle = false;
    self->block->launch->kernel->body(self->block->launch->params);
    self->idle = true;
    to_scheduler(DONE, true);
  }
}

// Starts a fiber that is new, or that was left inside a kernel.
void begin(Fiber* fiber) {
  Context& context = fiber->context;
  context.has_run = false;
  getcontext(&context.start);
  context.start.uc_stack.ss_sp = fiber->stack;
  context.start.uc_stack.ss_size = STACK_BYTES;
  context.start.uc_link = nullptr;
  makecontext(&context.start, fiber_main, 0);
}

Fiber* take_fiber() {
  if (!pool.empty()) {
    Fiber* fiber = pool.back();
    pool.pop_back();
    clean_stack(fiber);
    return fiber;
  }
  void* stack = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stack == MAP_FAILED) return nullptr;
  Fiber* fiber = new Fiber;
  fiber->stack = static_cast<u8*>(stack);
  return fiber;
}

const Kernel* find_kernel(const char* name) {
  for (const Kernel* kernel = kernels; kernel != nullptr; kernel = kernel->next) {
    if (std::strcmp(kernel->name, name) == 0) return kernel;
  }
  return nullptr;
}

void start_block(Launch& launch, const ShimStep& step, u32 x, u32 y) {
  auto block = std::make_unique<Block>();
  block->launch = &launch;
  block->live = step.threads;
  block->warps.resize(step.threads / LANES);
  for (u32 thread = 0; thread < step.threads; ++thread) {
    Fiber* fiber = take_fiber();
    if (fiber == nullptr) return fail("no memory for a fiber's stack");
    fiber->place = Place{{thread, 0, 0}, {x, y, 0}, {step.threads, 1, 1}, {step.grid_x, step.grid_y, 1}};
    fiber->block = block.get();
    fiber->round = 0;
    fiber->slow = one_in(4);
    fiber->delayed.clear();
    fiber->fake_stack = nullptr;
    if (!fiber->idle) begin(fiber);
    block->fibers.push_back(fiber);
    wake(fiber);
    ++launch.live_fibers;
  }
  launch.blocks.push_back(std::move(block));
}

u64 blocks_of(const ShimStep& step) { return static_cast<u64>(step.grid_x) * step.grid_y; }

// False if all have been started.
bool start_next_block(Launch& launch) {
  const ShimStep& step = *launch.step;
  if (launch.started == blocks_of(step)) return false;
  const u64 block = launch.started++;
  start_block(launch, step, static_cast<u32>(block % step.grid_x), static_cast<u32>(block / step.grid_x));
  return true;
}

// Blocks that wait for no others make room for the next.
void end_block(Block& ended) {
  Launch& launch = *ended.launch;
  make_all_visible(ended.ordered);
  for (Fiber* fiber : ended.fibers) {
    make_all_visible(fiber->delayed);
    pool.push_back(fiber);
  }
  for (auto& block : launch.blocks) {
    if (block.get() != &ended) continue;
    block.swap(launch.blocks.back());
    launch.blocks.pop_back();
    break;
  }
  start_next_block(launch);
}

void start_launch(Stream& stream, const ShimStep& step) {
  const Kernel* kernel = find_kernel(step.kernel);
  if (kernel == nullptr) return fail(std::string("there is no kernel ") + step.kernel);
  if (kernel->params != step.params_bytes) {
    return fail(std::string(step.kernel) + " takes " + std::to_string(kernel->params) + " bytes of parameters, found " +
                std::to_string(step.params_bytes));
  }
  if (step.threads == 0 || step.threads % LANES != 0 || step.threads > kernel->most_threads) {
    return fail(std::string(step.kernel) + " was launched with " + std::to_string(step.threads) + " threads");
  }
  stream.launch = std::make_unique<Launch>();
  stream.launch->kernel = kernel;
  stream.launch->params = step.params;
  stream.launch->step = &step;
  const u64 at_once = step.together ? blocks_of(step) : BLOCKS_AT_ONCE;
  while (stream.launch->started < at_once && start_next_block(*stream.launch)) {
  }
}

void forget(std::vector<Fiber*>& list, const Launch& launch) {
  std::vector<Fiber*> kept;
  for (Fiber* fiber : list) {
    if (fiber->block->launch != &launch) kept.push_back(fiber);
  }
  list.swap(kept);
}

// Kernels end with everything visible; one that trapped ends as it is.
void end_launch(Stream& stream) {
  Launch& launch = *stream.launch;
  for (auto& block : launch.blocks) {
    if (!launch.trapped) make_all_visible(block->ordered);
    for (Fiber* fiber : block->fibers) {
      if (!launch.trapped) make_all_visible(fiber->delayed);
      pool.push_back(fiber);
    }
  }
  if (launch.trapped) {
    forget(ready, launch);
    forget(spinning, launch);
    stream.given->trapped = 1;
    stream.next = stream.given->count;
  }
  stream.launch.reset();
}

// Runs a stream's next step, if it can; true if anything was done.
bool advance(Stream& stream) {
  if (stream.launch != nullptr) {
    if (stream.launch->live_fibers != 0 && !stream.launch->trapped) return false;
    end_launch(stream);
    return true;
  }
  if (stream.next == stream.given->count) return false;
  const ShimStep& step = stream.given->steps[stream.next];
  if (step.kind == SHIM_HOLD) {
    if (stream.held_until == 0) stream.held_until = ticks + step.length;
    if (ticks < stream.held_until) return false;
    stream.held_until = 0;
  }
  ++stream.next;
  if (step.kind == SHIM_COPY) std::memcpy(step.to, step.from, step.length);
  if (step.kind == SHIM_FILL) std::memset(step.to, static_cast<int>(step.byte), step.length);
  if (step.kind == SHIM_LAUNCH) start_launch(stream, step);
  return true;
}

void finish(Fiber* fiber) {
  Block& block = *fiber->block;
  --block.launch->live_fibers;
  --block.live;
  --block.warps[fiber->place.thread.x / LANES].live;
  // Threads that are gone do not hold the others up.
  if (block.arrived != 0 && block.arrived == block.live) complete_barrier(block);
  if (block.live == 0 && !block.launch->step->together) end_block(block);
}

void resume(Fiber* fiber) {
  current = fiber;
  here = fiber->place;
  leaving_main(fiber);
  switch_context(main_context, fiber->context);
  back_in_main();
  if (fiber->block->launch->trapped) return;
  if (fiber->state != SPINNING) progress = true;
  if (fiber->state == READY) ready.push_back(fiber);
  if (fiber->state == SPINNING) spinning.push_back(fiber);
  if (fiber->state == DONE) finish(fiber);
}

// One thread, any: true if there was one.
bool run_one() {
  if (ready.empty()) return false;
  u64 at = random_number() % ready.size();
  // Threads differ in speed, so that some of a block are far behind the others.
  for (u32 i = 0; i < 4 && ready[at]->slow; ++i) at = random_number() % ready.size();
  Fiber* fiber = ready[at];
  ready[at] = ready.back();
  ready.pop_back();
  resume(fiber);
  return true;
}

bool any_left(const std::vector<Stream>& streams) {
  for (const Stream& stream : streams) {
    if (stream.launch != nullptr || stream.next != stream.given->count) return true;
  }
  return false;
}

bool any_held(const std::vector<Stream>& streams) {
  for (const Stream& stream : streams) {
    if (stream.held_until != 0) return true;
  }
  return false;
}

void wake_spinning() {
  for (Fiber* fiber : spinning) wake(fiber);
  spinning.clear();
}

void run(std::vector<Stream>& streams) {
  while (failure.empty() && any_left(streams)) {
    bool moved = false;
    // Ranks start when they like: a stream's next step is taken now, or after more threads ran.
    for (Stream& stream : streams) {
      if ((ready.empty() || one_in(4)) && advance(stream)) moved = progress = true;
    }
    for (u32 i = 0; i < 8 && run_one(); ++i) moved = true;
    // Now and then a waiting rank looks early, and finds what others left half done.
    if (one_in(2)) wake_spinning();
    if (!ready.empty()) continue;
    if (!moved && spinning.empty() && !any_held(streams)) {
      // Nothing was done in this round, though every stream was asked: it cannot change any more.
      return fail("a barrier or a warp operation can never complete: not all threads of the block come to it");
    }
    if (!progress && beside_others) {
      ++ticks;
      sched_yield();
    } else if (!progress && ++ticks > MOST_TICKS) {
      return fail("a kernel spins for ever");
    }
    progress = false;
    wake_spinning();
  }
}

}  // namespace

Kernel::Kernel(const char* n, void (*b)(const void*), u64 p, u32 threads)
    : name(n), body(b), params(p), most_threads(threads), next(kernels) {
  kernels = this;
}

void pause() {
  maybe_make_one_visible(current->delayed);
  maybe_make_one_visible(current->block->ordered);
  if (one_in(8)) to_scheduler(READY);
}

void spin() { to_scheduler(SPINNING); }

void barrier() {
  Block& block = *current->block;
  if (++block.arrived == block.live) {
    current->state = READY;
    complete_barrier(block);
    to_scheduler(READY);
  } else {
    to_scheduler(WAITING);
  }
}

void meet_lanes(u32 mask, char operation, u64 value) {
  Fiber* self = current;
  const u32 lane = self->place.thread.x % LANES;
  Warp& warp = self->block->warps[self->place.thread.x / LANES];
  if (mask != 0xffffffffu || warp.live != LANES) {
    fail("a warp operation needs all 32 lanes");
    trap();
  }
  if (warp.arrived != 0 && warp.operation != operation) {
    fail("the lanes of a warp came to different operations");
    trap();
  }
  warp.operation = operation;
  // Two sets of values: a slow lane still reads this one while a fast lane deposits for the next operation.
  warp.values[self->round++ % 2][lane] = value;
  if (++warp.arrived != LANES) return to_scheduler(WAITING);
  warp.arrived = 0;
  const u32 first = self->place.thread.x / LANES * LANES;
  for (u32 i = 0; i < LANES; ++i) {
    Fiber* other = self->block->fibers[first + i];
    if (other != self) wake(other);
  }
}

u64 of_lane(u32 lane) {
  return current->block->warps[current->place.thread.x / LANES].values[(current->round - 1) % 2][lane];
}

void mma(float* c, const u32* a, const u32* b) {
  Fiber* self = current;
  const u32 lane = self->place.thread.x % LANES;
  Warp& warp = self->block->warps[self->place.thread.x / LANES];
  Fragments& own = warp.fragments[self->round % 2][lane];
  std::memcpy(own.a, a, sizeof own.a);
  std::memcpy(own.b, b, sizeof own.b);
  meet_lanes(0xffffffffu, 'a', 0);
  const Fragments* all = warp.fragments[(self->round - 1) % 2];
  const auto half = [](u32 word, u32 k) { return float_of_bits(k % 2 == 0 ? word << 16 : word & 0xffff0000u); };
  // Rows lane / 4 and eight more; columns 2 (lane % 4) and the next.
  for (u32 i = 0; i < 4; ++i) {
    const u32 column = lane % 4 * 2 + i % 2;
    for (u32 k = 0; k < 16; ++k) {
      const u32 word = k / 8, four = k % 8 / 2;
      c[i] += half(all[lane / 4 * 4 + four].a[2 * word + i / 2], k) * half(all[column * 4 + four].b[word], k);
    }
  }
}

void* shared_memory(u64 bytes) {
  Block& block = *current->block;
  if (block.shared == nullptr) {
    block.shared = std::make_unique<u8[]>(bytes);
    block.shared_bytes = bytes;
    // Without a barrier the sort takes this for counts: zeros keep its positions near the arrays.
    std::memset(block.shared.get(), mutant == NO_SORT_BARRIER || left_out_file != nullptr ? 0 : 0xa5, bytes);
  }
  if (block.shared_bytes != bytes) {
    fail("a kernel declared two shared structs");
    trap();
  }
  return block.shared.get();
}

void push(void* to, const void* from, u32 bytes) {
  if (reinterpret_cast<u64>(to) % bytes != 0) misaligned(to);
  // Reads what is there, so that an address that is not the rank's is found here and not at some later release.
  DelayedStore store{to, bytes, {}};
  std::memcpy(store.of, to, bytes);
  std::memcpy(store.of, from, bytes);
  current->delayed.push_back(store);
  if (bytes == 16) stored_bytes += bytes;
  pause();
}

void store_release(u64* word, u64 value) {
  make_all_visible(current->delayed);
  make_all_visible(current->block->ordered);
  // Ranks may be threads of other processes.
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
  to_scheduler(READY);
}

u64 load_acquire(const u64* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

void trap() {
  current->block->launch->trapped = true;
  to_scheduler(DONE, true);
  __builtin_unreachable();
}

u64 now_ns() {
  if (!beside_others) return ticks * 1000;
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<u64>(now.tv_sec) * 1000000000ull + static_cast<u64>(now.tv_nsec);
}

void misaligned(const void* address) {
  char text[64];
  std::snprintf(text, sizeof text, "misaligned access at %p", address);
  fail(text);
  trap();
}

}  // namespace shim

extern "C" void semmoe_shim_beside_others(u32 on) { shim::beside_others = on != 0; }

extern "C" void semmoe_shim_leave_out(const char* file, u32 line) {
  shim::left_out_file = file;
  shim::left_out_line = line;
}

extern "C" void semmoe_shim_moved(u64* loaded, u64* stored) {
  *loaded = shim::loaded_bytes;
  *stored = shim::stored_bytes;
}

extern "C" int semmoe_shim_run(ShimStream* given, u64 count, u64 seed, u32 mutant, char* message, u64 message_bytes) {
  using namespace shim;
  ready.clear();
  spinning.clear();
  ticks = 1;
  progress = false;
  loaded_bytes = stored_bytes = 0;
  failure.clear();
  random_state = seed * 0x9e3779b97f4a7c15ull + 1;
  shim::mutant = static_cast<Mutant>(mutant);
  std::vector<Stream> streams(count);
  for (u64 i = 0; i < count; ++i) {
    streams[i].given = &given[i];
    given[i].trapped = 0;
  }
  run(streams);
  // After a failure fibers may be left behind; they go back to the pool with their launch.
  for (Stream& stream : streams) {
    if (stream.launch == nullptr) continue;
    stream.launch->trapped = true;
    end_launch(stream);
  }
  std::snprintf(message, message_bytes, "%s", failure.c_str());
  return failure.empty() ? 0 : 1;
}
