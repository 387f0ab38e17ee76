// Never compiled with -fsanitize=thread, which would instrument the switch itself; EMU_TSAN=1 says
// that the kernels are.
#include "fiber.h"

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif
#ifdef EMU_TSAN
#include <sanitizer/tsan_interface.h>
#endif

#ifndef __x86_64__
#error "the switch below is written for x86-64"
#endif

namespace emu {
namespace {

#ifdef __SANITIZE_ADDRESS__
constexpr size_t kStackBytes = 256 << 10;  // red zones make frames large
const void* host_stack = nullptr;
size_t host_stack_bytes = 0;
#else
constexpr size_t kStackBytes = 64 << 10;
#endif
constexpr size_t kGuardBytes = 4096;
constexpr int kSavedRegisters = 6;

#ifdef EMU_TSAN
std::vector<void*> ended_race_states;
#endif

// Saves the registers that a function call preserves and the stack pointer; loads another's.
__attribute__((naked, noinline)) void jump(void** /*save*/, void* /*load*/) {
  asm("push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15\n"
      "mov %rsp, (%rdi); mov %rsi, %rsp\n"
      "pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp; ret");
}

char* map_stack() {
  void* memory = mmap(nullptr, kStackBytes + kGuardBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) abort();
  mprotect(memory, kGuardBytes, PROT_NONE);  // an overflow is a fault, not a surprise
  return static_cast<char*>(memory) + kGuardBytes;
}

void switch_stacks(Fiber& from, Fiber& to, [[maybe_unused]] void** shadow) {
#ifdef __SANITIZE_ADDRESS__
  if (to.stack == nullptr)
    __sanitizer_start_switch_fiber(shadow, host_stack, host_stack_bytes);
  else
    __sanitizer_start_switch_fiber(shadow, to.stack, kStackBytes);
#endif
#ifdef EMU_TSAN
  __tsan_switch_to_fiber(to.race_state, __tsan_switch_to_fiber_no_sync);
#endif
  jump(&from.stack_pointer, to.stack_pointer);
#ifdef __SANITIZE_ADDRESS__
  if (from.stack == nullptr)
    __sanitizer_finish_switch_fiber(from.shadow, nullptr, nullptr);
  else
    __sanitizer_finish_switch_fiber(from.shadow, &host_stack, &host_stack_bytes);
#endif
}

}  // namespace

void adopt_running([[maybe_unused]] Fiber& host) {
#ifdef EMU_TSAN
  host.race_state = __tsan_get_current_fiber();
#endif
}

void prepare(Fiber& fiber, void (*entry)()) {
  if (fiber.stack == nullptr) fiber.stack = map_stack();
#ifdef __SANITIZE_ADDRESS__
  __asan_unpoison_memory_region(fiber.stack, kStackBytes);  // frames of its last life
#endif
  void** top = reinterpret_cast<void**>(fiber.stack + kStackBytes);
  *--top = nullptr;  // the address entry() would return to; keeps its stack aligned
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < kSavedRegisters; ++i) *--top = nullptr;
  fiber.stack_pointer = top;
  fiber.shadow = nullptr;
#ifdef EMU_TSAN
  fiber.race_state = __tsan_create_fiber(0);
#endif
}

void entered() {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(nullptr, &host_stack, &host_stack_bytes);
#endif
}

void switch_between(Fiber& from, Fiber& to) { switch_stacks(from, to, &from.shadow); }

void end_in(Fiber& from, Fiber& host) {
  switch_stacks(from, host, nullptr);
  abort();
}

void recycle([[maybe_unused]] Fiber& fiber) {
#ifdef EMU_TSAN
  ended_race_states.push_back(fiber.race_state);
  // A fresh mapping has no history of accesses by other threads.
  munmap(fiber.stack - kGuardBytes, kStackBytes + kGuardBytes);
  fiber.stack = nullptr;
#endif
}

void forget_ended_fibers() {
#ifdef EMU_TSAN
  for (void* state : ended_race_states) __tsan_destroy_fiber(state);
  ended_race_states.clear();
#endif
}

void happens_before([[maybe_unused]] void* tag) {
#ifdef EMU_TSAN
  __tsan_release(tag);
#endif
}

void happens_after([[maybe_unused]] void* tag) {
#ifdef EMU_TSAN
  __tsan_acquire(tag);
#endif
}

}  // namespace emu
