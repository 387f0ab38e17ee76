// Masks that the whole batch shares: lists, gathered columns and the way back. No CPU kernel does
// this in three steps; the comparison is with the plain loops below.
#include "shared_masks.cuh"
#include "unit_shapes.h"

namespace checks {
namespace {

using namespace fused_recoder;

struct Lists {
  Both<int32_t> listed, place;  // [T,K,length], [T,K,H]
};

Lists list_on_the_host(const ListUnits& p) {
  Lists lists{unwritten<int32_t>(p.steps * p.samples * p.length),
              unwritten<int32_t>(p.steps * p.samples * p.units)};
  for (int64_t i = 0; i < p.steps * p.samples; ++i) {
    int64_t count = 0;
    for (int64_t unit = 0; unit < p.units; ++unit) {
      float factor[4] = {1, 1, 1, 1};
      if (p.dropout.seed != nullptr)
        dropout_quad<float>(p.dropout, p.first_time + i / p.samples, i % p.samples, 0, unit / 4,
                            factor);
      if ((factor[unit % 4] == 0) != p.dropped) continue;
      lists.place.cpu[i * p.units + unit] = count;
      lists.listed.cpu[i * p.length + count++] = unit;
    }
  }
  return lists;
}

void check_list(int64_t steps, int64_t samples, int64_t units, int64_t length, double probability,
                bool dropped, int threads) {
  context() = "list_units of " + std::to_string(units) + " dropped " + std::to_string(dropped) +
              " threads " + std::to_string(threads);
  ListUnits p{
      steps, samples, units,   length, make_dropout(kSeed.data(), kSampleStream, probability),
      4,     dropped, nullptr, nullptr};
  const Lists lists = list_on_the_host(p);
  p.listed = lists.listed.cuda.data();
  p.place = lists.place.cuda.data();
  for (size_t i = 0; i < lists.listed.cuda.size(); ++i) p.listed[i] = -77;
  for (size_t i = 0; i < lists.place.cuda.size(); ++i) p.place[i] = -77;
  expect_launches(1, [&] {
    if (threads == 0)
      cuda_table<float>().list_units(kStream, p);
    else
      cuda::launch_list_units(nullptr, p, threads);
  });
  expect_equal("listed", lists.listed);
  expect_equal("place", lists.place);
}

void lists() {
  if (at_thesis_shape())
    return check_list(1, kThesisRows, kThesisHidden, kThesisHidden, 0.3, true, 0);
  check_list(1, 1, 1, 1, 0.5, true, 0);
  check_list(2, 3, 50, 40, 0.3, true, 0);
  check_list(2, 2, 51, 51, 0.7, false, 0);
  check_list(1, 2, 650, 300, 0.3, true, 0);   // several rounds
  check_list(1, 2, 300, 300, 0.5, true, 33);  // a warp of one lane, several rounds
  check_list(1, 3, 37, 37, 0.2, true, 3);     // less than a warp
  check_list(1, 2, 8, 8, 0, true, 0);         // nothing dropped
  check_list(1, 2, 8, 8, 0, false, 0);        // everything kept
}

void lists_that_are_too_short() {
  const Array<int32_t> listed(8, 0), place(100, 0);
  std::string message = "nothing";
  try {
    cuda_table<float>().list_units(
        kStream, {1, 1, 100, 8, make_dropout(kSeed.data(), kSampleStream, 0.5), 4, true,
                  listed.data(), place.data()});
  } catch (const emu::Error& error) {
    message = error.what();
  }
  if (message.find("more units than were made room for") == std::string::npos)
    throw std::runtime_error("a list that is too short raised " + message);
}

// Of K masks over H units, each with some entries that are padding.
Lists some_lists(int64_t K, int64_t H, int64_t length) {
  const ListUnits p{1, K,    H,       length, make_dropout(kSeed.data(), kSampleStream, 0.4),
                    0, true, nullptr, nullptr};
  Lists lists = list_on_the_host(p);
  for (size_t i = 0; i < lists.listed.cpu.size(); ++i) lists.listed.cuda[i] = lists.listed.cpu[i];
  for (size_t i = 0; i < lists.place.cpu.size(); ++i) lists.place.cuda[i] = lists.place.cpu[i];
  return lists;
}

constexpr int64_t kSamples = 2, kRows = 2;

// Columns of W have the length of a shape's rows. variant bit: 1 without them
template <typename S>
void check_gather(const Shape& shape, int variant) {
  using A = typename AccumulateIn<S>::type;
  context() = describe("gather_units", sizeof(S), shape) + std::to_string(variant);
  const int64_t K = kSamples, B = kRows, H = 3 + shape.rows, V = shape.hidden, N = H;
  const bool with_columns = !(variant & 1);
  const Lists lists = some_lists(K, H, N);
  const auto h = random_values<S>(B * H, 1), weight_t = random_values<S>(H * V, 1, shape.offset);
  const auto listed_h = unwritten<S>(K * B * N);
  const auto columns = with_columns ? unwritten<S>(K * N * V, shape.offset) : absent<S>();
  const double factor = 0.75;
  const GatherUnits<S> p{K,
                         B,
                         H,
                         V,
                         N,
                         lists.listed.cuda.data(),
                         h.cuda.data(),
                         factor,
                         listed_h.cuda.data(),
                         weight_t.cuda.data(),
                         columns.cuda.data()};
  expect_launches(1, [&] {
    if (shape.plan.threads == 0)
      cuda_table<S>().gather_units(kStream, p);
    else
      cuda::launch_gather_units(nullptr, p, shape.plan);
  });
  for (int64_t k = 0; k < K; ++k)
    for (int64_t i = 0; i < N; ++i) {
      const int unit = lists.listed.cpu[k * N + i];
      for (int64_t b = 0; b < B; ++b)
        listed_h.cpu[(k * B + b) * N + i] = unit < 0 ? A(0) : A(factor) * h.cpu[b * H + unit];
      for (int64_t v = 0; with_columns && v < V; ++v)
        columns.cpu[(k * N + i) * V + v] = unit < 0 ? A(0) : weight_t.cpu[unit * V + v];
    }
  expect_close("listed_h", listed_h, 1);
  expect_close("columns", columns, 0);
}

// variant bit: 1 on top of what is there
template <typename A>
void check_scatter(const Shape& shape, int variant) {
  context() = describe("scatter_units", sizeof(A), shape) + std::to_string(variant);
  const int64_t K = kSamples, B = shape.rows, H = shape.hidden, N = H;
  const Lists lists = some_lists(K, H, N);
  const auto back = random_values<A>(K * B * N, 1);
  const auto dh = variant & 1 ? random_values<A>(B * H, 1) : unwritten<A>(B * H);
  const double base_factor = variant & 1 ? 1.25 : 0;
  const ScatterUnits<A> p{
      K, B, H, N, lists.place.cuda.data(), back.cuda.data(), -1.25, base_factor, dh.cuda.data()};
  expect_launches(1, [&] {
    if (shape.plan.threads == 0)
      cuda_table<A>().scatter_units(kStream, p);
    else
      cuda::launch_scatter_units(nullptr, p, shape.plan);
  });
  for (int64_t b = 0; b < B; ++b)
    for (int64_t j = 0; j < H; ++j) {
      A sum = variant & 1 ? A(base_factor) * dh.cpu[b * H + j] : A(0);
      for (int64_t k = 0; k < K; ++k) {
        const int place = lists.place.cpu[k * H + j];
        if (place >= 0) sum -= A(1.25) * back.cpu[(k * B + b) * N + place];
      }
      dh.cpu[b * H + j] = sum;
    }
  expect_close("dh", dh, 8, 1);
}

template <typename S>
void gathers() {
  if (at_thesis_shape()) return check_gather<S>({2, kThesisVocab, 0, kPlanned}, 0);
  for_shapes(2, 2, 0, check_gather<S>);
}

template <typename A>
void scatters() {
  for_shapes(2, 2, 1, check_scatter<A>);
}

const Register kChecks[] = {
    {"list_units", lists},
    {"list_units_too_short", lists_that_are_too_short},
    {"gather_units_float", gathers<float>},
    {"gather_units_double", gathers<double>},
    {"gather_units_half", gathers<__half>},
    {"gather_units_bfloat16", gathers<__nv_bfloat16>},
    {"scatter_units_float", scatters<float>},
    {"scatter_units_double", scatters<double>},
};

}  // namespace
}  // namespace checks
