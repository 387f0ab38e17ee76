// cp.async: copies from global to shared memory that a thread has started and not yet waited for.
#pragma once

#include <array>
#include <deque>
#include <vector>

#include "lanes.h"
#include "memory.h"

namespace ptx {

struct AsyncCopy {
  LaneAccess to;
  std::array<char, 16> data;
};

class AsyncCopies {
 public:
  void add(int lane, const AsyncCopy& copy) { groups_[lane].back().push_back(copy); }
  void commit(int lane) { groups_[lane].emplace_back(); }
  // Those of all committed groups but the last `pending`.
  std::vector<AsyncCopy> take(int lane, size_t pending);

 private:
  using Group = std::vector<AsyncCopy>;
  // The last one is still open.
  std::array<std::deque<Group>, kLanes> groups_ = filled();
  static std::array<std::deque<Group>, kLanes> filled();
};

}  // namespace ptx
