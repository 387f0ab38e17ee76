#include "memory.h"

#include <algorithm>

#include "../emu/device_memory.h"
#include "fault.h"

namespace ptx {
namespace {

std::string verb(const LaneAccess& access) {
  const char* const verbs[] = {"reads ", "writes ", "changes "};
  return verbs[int(access.how)] + std::to_string(access.bytes) + " bytes ";
}

void check_alignment(const LaneAccess& access) {
  if (access.address % access.bytes == 0) return;
  throw Fault{verb(access) + "at a misaligned address (" +
              std::to_string(access.address % access.bytes) + " beyond a multiple of them)"};
}

std::string between(const Stretch& stretch, const LaneAccess& access) {
  const int64_t before = int64_t(stretch.begin - access.address);
  const int64_t beyond = int64_t(access.address + access.bytes - stretch.begin - stretch.bytes);
  return before > 0 ? std::to_string(before) + " bytes before the start"
                    : std::to_string(beyond) + " bytes beyond the end";
}

}  // namespace

char* Stretch::touch(History& history, const LaneAccess& access) {
  if (traces_.empty()) traces_.resize((bytes + granule_ - 1) / granule_);
  const uint64_t offset = access.address - begin;
  for (uint64_t i = offset / granule_; i * granule_ < offset + access.bytes; ++i) {
    const Who other = history.touch(traces_[i], access.thread, access.how);
    if (other != kNobody)
      throw Fault{"race: " + verb(access) + "that " + describe(other) +
                  " touched before, and nothing orders the two"};
  }
  return data_ + offset;
}

GlobalMemory::GlobalMemory() {
  for (const auto& [begin, extent] : emu::device_memory())
    stretches_.emplace_back(begin, extent.bytes, extent.granule, reinterpret_cast<char*>(begin));
}

Stretch& GlobalMemory::find(const LaneAccess& access) {
  if (last_ < stretches_.size() && stretches_[last_].holds(access)) return stretches_[last_];
  const auto after = std::upper_bound(
      stretches_.begin(), stretches_.end(), access.address,
      [](uint64_t address, const Stretch& stretch) { return address < stretch.begin; });
  if (after != stretches_.begin() && (after - 1)->holds(access)) {
    last_ = after - 1 - stretches_.begin();
    return *(after - 1);
  }
  std::string where = "outside of all memory";
  constexpr uint64_t kNear = 4096;
  if (after != stretches_.begin() &&
      access.address < (after - 1)->begin + (after - 1)->bytes + kNear)
    where = between(*(after - 1), access) + " of an array of " +
            std::to_string((after - 1)->bytes) + " bytes";
  else if (after != stretches_.end() && access.address + kNear > after->begin)
    where = between(*after, access) + " of an array of " + std::to_string(after->bytes) + " bytes";
  throw Fault{verb(access) + "of global memory " + where};
}

char* GlobalMemory::touch(History& history, const LaneAccess& access) {
  check_alignment(access);
  return find(access).touch(history, access);
}

SharedMemory::SharedMemory(const Kernel& kernel, size_t dynamic_bytes)
    : states_(kernel.dynamic_shared_offset + dynamic_bytes, kHole),
      data_(states_.size(), char(0xff)),
      stretch_(0, data_.size(), 1, data_.data()) {
  for (const SharedVariable& variable : kernel.shared)
    std::fill_n(states_.begin() + variable.offset, variable.bytes, kUnwritten);
  std::fill(states_.begin() + kernel.dynamic_shared_offset, states_.end(), kUnwritten);
}

bool SharedMemory::holds(const LaneAccess& access, State state) const {
  const auto first = states_.begin() + access.address;
  return std::find(first, first + access.bytes, state) != first + access.bytes;
}

void SharedMemory::check(const LaneAccess& access) const {
  check_alignment(access);
  if (!stretch_.holds(access) || holds(access, kHole))
    throw Fault{verb(access) + "of shared memory outside of the block's variables"};
  if (holds(access, kUnderWay))
    throw Fault{verb(access) + "of shared memory that an asynchronous copy has yet to write"};
}

bool SharedMemory::written(const LaneAccess& access) const { return !holds(access, kUnwritten); }

char* SharedMemory::touch(History& history, const LaneAccess& access) {
  check(access);
  if (access.how == Touch::kWrite)
    std::fill_n(states_.begin() + access.address, access.bytes, kWritten);
  return stretch_.touch(history, access);
}

void SharedMemory::expect(History& history, const LaneAccess& access) {
  touch(history, access);
  std::fill_n(states_.begin() + access.address, access.bytes, kUnderWay);
}

char* SharedMemory::deliver(History& history, const LaneAccess& access) {
  std::fill_n(states_.begin() + access.address, access.bytes, kWritten);
  return stretch_.touch(history, access);
}

}  // namespace ptx
