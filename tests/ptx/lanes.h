// Sets of lanes, one bit each.
#pragma once

#include <bit>
#include <cstdint>

namespace ptx {

constexpr int kLanes = 32;
constexpr uint32_t kAllLanes = ~0u;

template <typename Body>
inline void for_lanes(uint32_t lanes, const Body& body) {
  for (; lanes != 0; lanes &= lanes - 1) body(std::countr_zero(lanes));
}

}  // namespace ptx
