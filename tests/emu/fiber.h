// Contexts of execution that switch by hand: one per CUDA thread, all on one thread of the
// operating system. Sanitizers are told about every switch.
#pragma once

namespace emu {

struct Fiber {
  void* stack_pointer = nullptr;
  char* stack = nullptr;       // null: the context of an operating-system thread
  void* shadow = nullptr;      // AddressSanitizer's fake stack
  void* race_state = nullptr;  // ThreadSanitizer's idea of a thread
};

// Makes `host` the context that is running now.
void adopt_running(Fiber& host);

// The next switch to `fiber` starts entry() on a clean stack. entry() calls entered() first and
// never returns: it leaves with end_in().
void prepare(Fiber& fiber, void (*entry)());
void entered();
void switch_between(Fiber& from, Fiber& to);
[[noreturn]] void end_in(Fiber& from, Fiber& host);

// After the fibers of a block have ended. ThreadSanitizer's states are kept until the launch ends:
// a state that is used again would take two blocks for one thread and hide their races.
void recycle(Fiber& fiber);
void forget_ended_fibers();

// Everything before happens_before(tag) is visible after happens_after(tag): what a barrier
// promises, in ThreadSanitizer's words.
void happens_before(void* tag);
void happens_after(void* tag);

}  // namespace emu
