// Compiled like fiber.cpp: never with -fsanitize=thread.
#include "scheduler.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "fiber.h"

// Bounds of the section that cuda_emu.h puts __shared__ variables into, from the linker; null where
// there is none.
extern "C" char __start_emu_shared[] __attribute__((weak));
extern "C" char __stop_emu_shared[] __attribute__((weak));

namespace emu {

Options options;
long launches = 0, bytes_moved = 0;
uint3 thread_index, block_index;
dim3 block_shape, grid_shape;
void* dynamic_shared;

namespace {

constexpr size_t kMaxThreads = 1024;
constexpr size_t kMaxBlocksYZ = 65535;
constexpr size_t kMaxSharedBytes = 48 << 10;  // more needs cudaFuncSetAttribute
constexpr size_t kMaxRaceStates = 8000;       // ThreadSanitizer follows no more
constexpr unsigned kWarp = 32;

enum class State { kReady, kAtBarrier, kAtCollective, kExited };

struct CudaThread {
  Fiber fiber;
  uint3 index;
  unsigned id;  // within the block
  State state;
  Place place;    // of the barrier or collective it waits at
  WarpCall call;  // kAtCollective
  unsigned votes;
};

struct Unwind {};  // thrown through every thread of a block that has failed

std::vector<CudaThread> threads;  // of the block; stacks are used again
unsigned thread_count;
CudaThread* running;
Fiber host;
const std::function<void()>* kernel;
std::string failure;
std::vector<std::vector<char>> shared_of_blocks;  // kept for the launch: no address comes twice

// Tags of happens_before: barriers order the threads of a block, __syncwarp those of a warp, and
// the end of the launch all of them. Blocks have tags of their own because nothing orders blocks.
struct BlockTags {
  char barrier, warp[kMaxThreads / kWarp];
};
BlockTags* tags;
char launch_tag, fence_tag;

bool same_place(const Place& a, const Place& b) {
  return a.line == b.line && strcmp(a.file, b.file) == 0;
}

std::string to_string(const Place& place) {
  return std::string(place.file) + ":" + std::to_string(place.line);
}

std::string activity(const CudaThread& thread) {
  switch (thread.state) {
    case State::kExited:
      return "exited";
    case State::kAtBarrier:
      return "at __syncthreads " + to_string(thread.place);
    case State::kAtCollective:
      return "at warp collective " + to_string(thread.place);
    case State::kReady:
      break;
  }
  return "running";
}

std::string where_everyone_is() {
  std::map<std::string, std::vector<unsigned>> groups;
  for (unsigned i = 0; i < thread_count; ++i) groups[activity(threads[i])].push_back(i);
  std::string text = " [block " + std::to_string(block_index.x) + "," +
                     std::to_string(block_index.y) + "," + std::to_string(block_index.z) + "]";
  for (const auto& [what, who] : groups)
    text += "\n  " + std::to_string(who.size()) + " thread(s) " + what + " (first " +
            std::to_string(who.front()) + ", last " + std::to_string(who.back()) + ")";
  return text;
}

void record_failure(const std::string& message) {
  if (failure.empty()) failure = "cuda_emu: " + message + where_everyone_is();
}

[[noreturn]] void fail(const std::string& message) {
  record_failure(message);
  throw Unwind();
}

void yield() {
  switch_between(running->fiber, host);
  if (!failure.empty()) throw Unwind();
}

void thread_main() {
  entered();
  try {
    if (failure.empty()) (*kernel)();
  } catch (const Unwind&) {
  }
  happens_before(&launch_tag);
  running->state = State::kExited;
  end_in(running->fiber, host);
}

// No thread can go on: either all of them wait at one barrier, or the kernel is wrong.
void release_barrier() {
  for (unsigned i = 0; i < thread_count; ++i) {
    if (threads[i].state == State::kExited)
      return record_failure("__syncthreads after some threads have exited");
    if (threads[i].state != State::kAtBarrier) return record_failure("deadlock");
    if (!same_place(threads[i].place, threads[0].place))
      return record_failure("divergent __syncthreads");
  }
  for (unsigned i = 0; i < thread_count; ++i) threads[i].state = State::kReady;
}

// All bits set are NaNs: what a block reads before it has written it shows.
constexpr char kUnwritten = char(0xff);

void forget_static_shared() {
  if (__start_emu_shared != nullptr) std::fill(__start_emu_shared, __stop_emu_shared, kUnwritten);
}

void run_block(size_t shared_bytes) {
  forget_static_shared();
  std::vector<unsigned> order(thread_count);
  std::iota(order.begin(), order.end(), 0u);
  if (options.order == Order::kReverse) std::reverse(order.begin(), order.end());
  std::mt19937 random(options.seed + block_index.x * 7919u + block_index.y * 104729u);
  // Of the exact size, so that AddressSanitizer guards its end.
  dynamic_shared =
      shared_bytes > 0 ? shared_of_blocks.emplace_back(shared_bytes, kUnwritten).data() : nullptr;
  adopt_running(host);
  for (unsigned i = 0; i < thread_count; ++i) {
    CudaThread& thread = threads[i];
    thread.id = i;
    thread.index = {i % block_shape.x, i / block_shape.x % block_shape.y,
                    i / (block_shape.x * block_shape.y)};
    thread.state = State::kReady;
    prepare(thread.fiber, thread_main);
  }
  for (unsigned exited = 0; exited < thread_count;) {
    if (options.order == Order::kRandom) std::shuffle(order.begin(), order.end(), random);
    bool progress = false;
    for (unsigned i : order) {
      if (threads[i].state != State::kReady) continue;
      running = &threads[i];
      thread_index = running->index;
      switch_between(host, running->fiber);
      exited += running->state == State::kExited;
      progress = true;
    }
    if (!progress) release_barrier();
    if (failure.empty()) continue;
    for (unsigned i = 0; i < thread_count; ++i)  // let them all unwind
      if (threads[i].state != State::kExited) threads[i].state = State::kReady;
  }
  for (unsigned i = 0; i < thread_count; ++i) recycle(threads[i].fiber);
}

void check_shape(dim3 grid, dim3 block, size_t shared_bytes) {
  const size_t per_block = size_t(block.x) * block.y * block.z;
  const size_t blocks = size_t(grid.x) * grid.y * grid.z;
  if (per_block == 0 || per_block > kMaxThreads || block.z > 64 || blocks == 0 ||
      grid.x > 2147483647u || grid.y > kMaxBlocksYZ || grid.z > kMaxBlocksYZ)
    throw Error("cuda_emu: invalid launch: grid " + std::to_string(grid.x) + "," +
                std::to_string(grid.y) + "," + std::to_string(grid.z) + ", block " +
                std::to_string(block.x) + "," + std::to_string(block.y) + "," +
                std::to_string(block.z));
  if (shared_bytes > kMaxSharedBytes)
    throw Error("cuda_emu: " + std::to_string(shared_bytes) + " bytes of dynamic shared memory");
#ifdef EMU_TSAN
  if (per_block * blocks > kMaxRaceStates)
    throw Error("cuda_emu: " + std::to_string(per_block * blocks) +
                " threads in a launch are more than ThreadSanitizer follows");
#endif
}

}  // namespace

void (*launcher)(const Call&) = run_on_fibers;

void launch(const Call& call) {
  check_shape(call.grid, call.block, call.shared_bytes);
  ++launches;
  launcher(call);
}

void run_on_fibers(const Call& call) {
  const dim3 grid = grid_shape = call.grid, block = block_shape = call.block;
  thread_count = block.x * block.y * block.z;
  kernel = &call.thread;
  if (threads.size() < thread_count) threads.resize(thread_count);
  std::vector<size_t> order(size_t(grid.x) * grid.y * grid.z);
  std::iota(order.begin(), order.end(), size_t(0));
  if (options.order == Order::kReverse) std::reverse(order.begin(), order.end());
  if (options.order == Order::kRandom)
    std::shuffle(order.begin(), order.end(), std::mt19937(options.seed));
  std::vector<BlockTags> tags_of_blocks(order.size());
  for (size_t i : order) {
    tags = &tags_of_blocks[i];
    block_index = {unsigned(i % grid.x), unsigned(i / grid.x % grid.y),
                   unsigned(i / grid.x / grid.y)};
#ifdef EMU_TSAN
    // __shared__ is thread_local here: a fresh thread has fresh shared memory.
    std::thread([&] { run_block(call.shared_bytes); }).join();
#else
    run_block(call.shared_bytes);
#endif
    if (!failure.empty()) break;
  }
  happens_after(&launch_tag);
  forget_ended_fibers();
  shared_of_blocks.clear();
  if (failure.empty()) return;
  const Error error(failure);
  failure.clear();
  throw error;
}

unsigned lane() { return running->id % kWarp; }

void fence() {
  happens_before(&fence_tag);
  happens_after(&fence_tag);
}

void assertion_failed(const char* condition, Place place) {
  fail(std::string("device assert ") + condition + " failed at " + to_string(place));
}

void sync_block(Place place) {
  running->state = State::kAtBarrier;
  running->place = place;
  happens_before(&tags->barrier);
  yield();
  happens_after(&tags->barrier);
}

namespace {

struct Warp {
  unsigned base, lanes;  // id of its first thread, number of threads
  CudaThread& operator[](unsigned l) const { return threads[base + l]; }
};

bool names(const WarpCall& call, unsigned l) { return call.mask >> l & 1; }

// Whether all lanes that the running thread names have come to the same call.
bool complete(const Warp& warp) {
  const WarpCall& call = running->call;
  if (!names(call, lane())) fail("the calling lane is not in its own mask");
  bool all = true;
  for (unsigned l = 0; l < warp.lanes; ++l) {
    if (!names(call, l)) continue;
    const CudaThread& other = warp[l];
    if (other.state == State::kExited) fail("the mask names an exited lane");
    if (other.state != State::kAtCollective)
      all = false;
    else if (other.call.kind != call.kind || other.call.mask != call.mask ||
             other.call.bytes != call.bytes || !same_place(other.place, running->place))
      fail("mismatched warp collective");
  }
  return all;
}

// Not memcpy: ThreadSanitizer would see it as an access by the running thread to another's stack.
void copy_register(void* to, const void* from, unsigned bytes) {
  if (bytes == 4)
    *static_cast<uint32_t*>(to) = *static_cast<const uint32_t*>(from);
  else
    *static_cast<uint64_t*>(to) = *static_cast<const uint64_t*>(from);
}

void exchange(const Warp& warp) {
  const unsigned mask = running->call.mask;
  unsigned votes = 0;
  for (unsigned l = 0; l < warp.lanes; ++l)
    if (mask >> l & 1) votes |= unsigned(warp[l].call.vote) << l;
  for (unsigned l = 0; l < warp.lanes; ++l) {
    if (!(mask >> l & 1)) continue;
    const WarpCall& call = warp[l].call;
    warp[l].votes = votes;
    if (call.kind != Collective::kShuffle) continue;
    const unsigned source = unsigned(call.source);
    if (source >= warp.lanes || !names(call, source))
      fail("shuffle reads lane " + std::to_string(source) + ", which takes no part");
    copy_register(call.result, warp[source].call.value, call.bytes);
  }
  for (unsigned l = 0; l < warp.lanes; ++l)
    if (mask >> l & 1) warp[l].state = State::kReady;
}

}  // namespace

unsigned sync_warp(const WarpCall& call) {
  CudaThread& self = *running;
  self.state = State::kAtCollective;
  self.place = call.place;
  self.call = call;
  const unsigned base = self.id / kWarp * kWarp;
  const Warp warp{base, std::min(kWarp, thread_count - base)};
  // Shuffles and votes order no memory.
  void* tag = call.kind == Collective::kSyncWarp ? &tags->warp[base / kWarp] : nullptr;
  if (tag != nullptr) happens_before(tag);
  if (complete(warp))
    exchange(warp);
  else
    yield();
  if (tag != nullptr) happens_after(tag);
  return self.votes;
}

}  // namespace emu
