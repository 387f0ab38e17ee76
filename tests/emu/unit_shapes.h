// Shapes, masks and variants for kernels that divide rows of hidden units (units.cuh).
#pragma once

#include "checks.h"
#include "units.cuh"

namespace checks {

using fused_recoder::Dropout;
using fused_recoder::Launch;
using fused_recoder::make_dropout;
using fused_recoder::cuda::UnitPlan;

// Launches that a test can ask for beside the one that the kernel table plans by itself.
constexpr UnitPlan kPlanned{0, 0};

struct Shape {
  int64_t rows, hidden;
  int offset;  // elements by which every pointer is misaligned
  UnitPlan plan;
};

inline const Shape kShapes[] = {
    {1, 1, 0, kPlanned},    // one of everything
    {3, 7, 0, kPlanned},    // not divisible
    {2, 8, 0, kPlanned},    // quads
    {2, 10, 0, kPlanned},   // pairs
    {2, 8, 1, kPlanned},    // quads, misaligned
    {2, 8, 2, kPlanned},    // quads, aligned as pairs
    {1, 300, 0, kPlanned},  // several warps, several blocks
    {1, 130, 0, kPlanned},  // several warps, pairs
    {2, 37, 0, {33, 1}},    // a warp of one lane
    {2, 131, 3, {5, 1}},    // less than a warp, several rounds
    {3, 12, 0, {20, 1}},    // more threads than quads
};
// Blocks that share a row cannot sum over it.
inline const Shape kSharedRows[] = {
    {2, 50, 0, {7, 2}},
    {1, 12, 0, {32, 5}},  // blocks without work
};

inline std::string describe(const char* what, size_t bytes, const Shape& shape) {
  return std::string(what) + " <" + std::to_string(bytes) + "> rows " + std::to_string(shape.rows) +
         " hidden " + std::to_string(shape.hidden) + " offset " + std::to_string(shape.offset) +
         " threads " + std::to_string(shape.plan.threads) + " blocks per row " +
         std::to_string(shape.plan.blocks_per_row) + " variant ";
}

// Every second row off; the first is on unless there is only one.
inline Both<uint8_t> some_rows(int64_t rows, int which) {
  Both<uint8_t> both = unwritten<uint8_t>(rows);
  for (int64_t b = 0; b < rows; ++b) both.set(b, b % 2 == which % 2);
  return both;
}

inline const Array<int64_t> kSeed = one(int64_t(1234567890123));
inline const Dropout kDropout = make_dropout(kSeed.data(), 2, 0.4);
inline const Dropout kOtherDropout = make_dropout(kSeed.data(), 3, 0.3);
inline const Dropout kNoDropout = make_dropout(nullptr, 0, 0);
constexpr uint32_t kTime = 3;
inline const Launch kStream{nullptr, nullptr};

constexpr Shape kThesis{kThesisRows, kThesisHidden, 0, kPlanned};

// All shapes, each with a few of the variants, so that every variant comes with some shape; or the
// thesis's with the `full` variant.
template <typename Body>
void for_shapes(int variants, int per_shape, int full, const Body& body) {
  if (at_thesis_shape()) return body(kThesis, full);
  int next = 0;
  const auto visit = [&](const Shape& shape) {
    for (int i = 0; i < (kThoroughly ? per_shape : 1); ++i, next += 7) body(shape, next % variants);
  };
  for (const Shape& shape : kShapes) visit(shape);
  for (const Shape& shape : kSharedRows) visit(shape);
}

}  // namespace checks
