// What the checks of the kernels share: arrays that exist twice, once for the CUDA kernel (run by
// the shim) and once for the CPU kernel it is compared with, and the comparison itself.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "device_memory.h"
#include "portable.cuh"
#include "tables.h"

namespace checks {

using fused_recoder::AccumulateIn;

// A check compares with the CPU and throws where it finds a difference. main() runs it in three
// orders of threads and demands the same bits each time.
struct Check {
  const char* name;
  void (*run)();
};
std::vector<Check>& all_checks();

struct Register {
  Register(const char* name, void (*run)()) { all_checks().push_back({name, run}); }
};

// ThreadSanitizer needs a millisecond for each CUDA thread: its build checks all shapes, but each
// with one variant of the arguments only.
#ifdef EMU_TSAN
constexpr bool kThoroughly = false;
#else
constexpr bool kThoroughly = true;
#endif

// Whether the checks run at the thesis's shape, H = 650 and V = 10,000, instead of at odd ones:
// with 8 rows, after which the alignment of their starts repeats, and with most arguments present.
bool& at_thesis_shape();
constexpr int64_t kThesisRows = 8, kThesisHidden = 650, kThesisVocab = 10000;

// A hash of everything compared so far.
uint64_t& digest();

// What the running comparison is about; part of every error message.
std::string& context();

std::mt19937& random_bits();

// n elements behind `offset` others, so that the first is misaligned by so many. Of the exact size,
// so that AddressSanitizer guards both ends.
template <typename T>
class Array {
 public:
  Array() = default;
  Array(size_t n, int offset)
      : offset_(offset),
        storage_(allocate(n + offset), std::free),
        size_(n),
        device_(storage_.get() + offset, n) {}
  T* data() const { return storage_ ? storage_.get() + offset_ : nullptr; }
  size_t size() const { return size_; }
  T& operator[](size_t i) const { return data()[i]; }

 private:
  // Aligned as on a GPU: sums depend on where the aligned part of a row starts.
  static T* allocate(size_t n) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 256, n * sizeof(T)) != 0) throw std::bad_alloc();
    return static_cast<T*>(memory);
  }

  int offset_ = 0;
  std::unique_ptr<T[], void (*)(void*)> storage_{nullptr, std::free};
  size_t size_ = 0;
  emu::DeviceMemory device_;
};

// Of a single element.
template <typename T>
Array<T> one(T value) {
  Array<T> array(1, 0);
  array[0] = value;
  return array;
}

// Elements of type T for the CUDA kernel and the same, widened, for the CPU kernel.
template <typename T>
struct Both {
  using Wide = std::conditional_t<std::is_integral_v<T>, T, typename AccumulateIn<T>::type>;
  Array<T> cuda;
  Array<Wide> cpu;

  void set(size_t i, double value) {
    cuda[i] = static_cast<T>(static_cast<Wide>(value));
    cpu[i] = static_cast<Wide>(cuda[i]);
  }
};

template <typename T>
Both<T> absent() {
  return {};
}

// Uniform in [-scale, scale].
template <typename T>
Both<T> random_values(size_t n, double scale, int offset = 0) {
  Both<T> both{{n, offset}, {n, 0}};
  std::uniform_real_distribution<double> uniform(-scale, scale);
  for (size_t i = 0; i < n; ++i) both.set(i, uniform(random_bits()));
  return both;
}

// For results: NaN (-1 for integers), so that what was never written shows.
template <typename T>
Both<T> unwritten(size_t n, int offset = 0) {
  Both<T> both{{n, offset}, {n, 0}};
  for (size_t i = 0; i < n; ++i)
    both.set(i, std::is_integral_v<T> ? -1 : std::numeric_limits<double>::quiet_NaN());
  return both;
}

template <typename T>
Both<T> values(std::initializer_list<double> list) {
  Both<T> both{{list.size(), 0}, {list.size(), 0}};
  size_t i = 0;
  for (double value : list) both.set(i++, value);
  return both;
}

// Half an ulp of T relative to its value, and the smallest step of T.
template <typename T>
struct Rounding {
  static constexpr double relative = 0, absolute = 0;  // stored as computed
};
template <>
struct Rounding<__half> {
  static constexpr double relative = 0x1p-11, absolute = 0x1p-25;
};
template <>
struct Rounding<__nv_bfloat16> {
  static constexpr double relative = 0x1p-8, absolute = 0x1p-134;
};

[[noreturn]] inline void differ(const std::string& name, size_t i, double cuda, double cpu) {
  char numbers[96];
  snprintf(numbers, sizeof numbers, "[%zu]: CUDA %.17g, CPU %.17g", i, cuda, cpu);
  throw std::runtime_error(name + numbers + " in " + context());
}

// `units` of the accumulation type's epsilon, beyond the rounding to storage, relative to
// size_of(CPU's value).
template <typename T, typename Size>
void expect_within(const char* name, const Both<T>& both, double units, const Size& size_of) {
  using Wide = typename Both<T>::Wide;
  const double epsilon = double(std::numeric_limits<Wide>::epsilon());
  for (size_t i = 0; i < both.cpu.size(); ++i) {
    const double cuda = double(static_cast<Wide>(both.cuda[i])), cpu = double(both.cpu[i]);
    const double allowed = units * epsilon * size_of(cpu) + Rounding<T>::absolute +
                           Rounding<T>::relative * std::fabs(cpu) * (1 + 1e-6);
    const bool close = std::isnan(cpu)   ? std::isnan(cuda)
                       : std::isinf(cpu) ? cuda == cpu
                                         : std::fabs(cuda - cpu) <= allowed;
    if (!close) differ(name, i, cuda, cpu);
    digest() = (digest() ^ std::hash<double>()(std::isnan(cuda) ? 0.5 : cuda)) * 1099511628211u;
  }
}

// Relative to the largest element, or to `terms`, the size of what was summed up.
template <typename T>
void expect_close(const char* name, const Both<T>& both, double units, double terms = 0) {
  double largest = terms;
  for (size_t i = 0; i < both.cpu.size(); ++i)
    if (std::isfinite(double(both.cpu[i])))
      largest = std::max(largest, std::fabs(double(both.cpu[i])));
  expect_within(name, both, units, [&](double) { return largest; });
}

template <typename T>
void expect_equal(const char* name, const Both<T>& both) {
  for (size_t i = 0; i < both.cpu.size(); ++i)
    if (both.cuda[i] != both.cpu[i]) differ(name, i, double(both.cuda[i]), double(both.cpu[i]));
}

// The kernel tables to compare, by storage type.
template <typename S>
const fused_recoder::Kernels<S>& cuda_table();
template <typename A>
const fused_recoder::Kernels<A>& cpu_table();
fused_recoder::Launch cpu_launch();

// What launches on the CUDA side: body() must do exactly `expected` launches.
template <typename Body>
void expect_launches(long expected, const Body& body) {
  const long before = emu::launches;
  body();
  if (emu::launches - before != expected)
    throw std::runtime_error(std::to_string(emu::launches - before) + " launches, expected " +
                             std::to_string(expected) + " in " + context());
}

}  // namespace checks
