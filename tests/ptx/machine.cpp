#include "machine.h"

#include <algorithm>
#include <numeric>
#include <random>

namespace ptx {
namespace {

using emu::Order;

std::vector<uint32_t> ordered(uint32_t count, uint32_t seed) {
  std::vector<uint32_t> order(count);
  std::iota(order.begin(), order.end(), 0u);
  if (emu::options.order == Order::kReverse) std::reverse(order.begin(), order.end());
  if (emu::options.order == Order::kRandom)
    std::shuffle(order.begin(), order.end(), std::mt19937(emu::options.seed + seed));
  return order;
}

}  // namespace

Block::Block(Launch& launch, uint32_t number, std::vector<char>& registers)
    : launch(launch),
      index{number % launch.grid.x, number / launch.grid.x % launch.grid.y,
            number / launch.grid.x / launch.grid.y},
      number(number),
      shared(launch.kernel, launch.dynamic_shared_bytes) {
  const uint32_t count = (launch.threads() + kLanes - 1) / kLanes;
  for (uint32_t i = 0; i < count; ++i)
    warps.push_back(std::make_unique<Warp>(
        *this, i, registers.data() + size_t(i) * launch.kernel.register_bytes));
  launch.counts.warps += count;
}

void Block::run() {
  launch.history.start_block(number);
  const std::vector<uint32_t> order = ordered(warps.size(), 1 + number);
  while (true) {
    bool progress = false, left = false;
    for (uint32_t i : order) {
      progress |= warps[i]->run();
      left |= !warps[i]->fronts().empty();
    }
    if (!left) return;
    if (!progress) release_barrier();
  }
}

// No warp can go on: either all threads wait at one barrier, or the kernel is wrong.
void Block::release_barrier() {
  const Instruction* barrier = nullptr;
  for (const auto& warp : warps)
    for (const Warp::Front& front : warp->fronts()) {
      const Instruction& at = launch.kernel.code[front.at];
      if (at.form->kind != Kind::kBarrier)
        warp->refuse(front, "waits for lanes that never come" + warp->whereabouts());
      if (barrier != nullptr && barrier != &at)
        warp->refuse(front, "waits while other threads wait at the barrier in line " +
                                std::to_string(barrier->line));
      barrier = &at;
    }
  refuse_early_exits();
  launch.history.barrier();
  for (const auto& warp : warps) warp->pass_barrier();
}

void Block::refuse_early_exits() const {
  const auto early =
      std::find_if(warps.begin(), warps.end(), [](const auto& warp) { return warp->exited != 0; });
  if (early == warps.end()) return;
  const uint32_t thread = (*early)->first_thread + std::countr_zero((*early)->exited);
  for (const auto& warp : warps)
    for (const Warp::Front& front : warp->fronts())
      warp->refuse(front, "waits at a barrier before which thread " + std::to_string(thread) +
                              " has exited");
}

void Launch::run() {
  ++counts.launches;
  const uint32_t warps = (threads() + kLanes - 1) / kLanes;
  // All bits set are NaNs: what is read before it has been written shows.
  std::vector<char> registers(size_t(warps) * kernel.register_bytes, char(0xff));
  for (uint32_t number : ordered(grid.x * grid.y * grid.z, 0))
    Block(*this, number, registers).run();
}

}  // namespace ptx
