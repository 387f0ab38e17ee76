#include "counts.h"

#include <algorithm>
#include <array>

#include "lanes.h"

namespace ptx {
namespace {

constexpr uint64_t kSector = 32, kWord = 4, kBanks = 32;

uint64_t pieces(uint64_t bytes, uint64_t size) { return (bytes + size - 1) / size; }

// Units of `size` bytes that the lanes touch, each once.
std::vector<uint64_t> units(const Access& access, uint32_t lanes, uint64_t size) {
  std::vector<uint64_t> all;
  for_lanes(lanes, [&](int lane) {
    const uint64_t first = access.address[lane] / size;
    const uint64_t last = (access.address[lane] + access.bytes - 1) / size;
    for (uint64_t unit = first; unit <= last; ++unit) all.push_back(unit);
  });
  std::sort(all.begin(), all.end());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  return all;
}

// Bytes, each once: all accesses have the same width and are aligned to it.
uint64_t bytes_of(const Access& access, uint32_t lanes) {
  return access.bytes * units(access, lanes, access.bytes).size();
}

}  // namespace

Requests& Requests::operator+=(const Requests& other) {
  count += other.count, parts += other.parts, least += other.least, bytes += other.bytes;
  return *this;
}

void Counts::add_global(const Instruction& at, const Access& access) {
  const uint64_t bytes = bytes_of(access, access.lanes);
  const Requests one{1, units(access, access.lanes, kSector).size(), pieces(bytes, kSector), bytes};
  (access.how == Touch::kRead ? loads : stores) += one;
  by_instruction[&at] += one;
}

// 8 bytes a lane are served by half warps, 16 by quarters.
void Counts::add_shared(const Access& access) {
  ++shared.count;
  const int together = access.bytes <= kWord ? kLanes : int(kLanes * kWord / access.bytes);
  for (int first = 0; first < kLanes; first += together) {
    const uint32_t lanes =
        access.lanes & (together == kLanes ? kAllLanes : ((1u << together) - 1) << first);
    if (lanes == 0) continue;
    std::array<uint64_t, kBanks> words{};
    for (uint64_t word : units(access, lanes, kWord)) ++words[word % kBanks];
    const uint64_t bytes = bytes_of(access, lanes);
    shared.parts += *std::max_element(words.begin(), words.end());
    shared.least += pieces(bytes, kWord * kBanks);
    shared.bytes += bytes;
  }
}

}  // namespace ptx
