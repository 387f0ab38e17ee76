// Instructions one by one, and what is counted of patterns that are known: instructions.cu.
#include <cmath>

#include "approximate.h"
#include "checks.h"
#include "rounding.h"

namespace checks {
namespace {

template <typename... Argument>
void launch(const char* kernel, unsigned threads, size_t shared_bytes, Argument... argument) {
  emu::launch({1, threads, shared_bytes, kernel, {{&argument, sizeof(argument)}...}, {}});
}

void expect(bool holds, const std::string& what, double found) {
  if (!holds) throw std::runtime_error(what + ": " + std::to_string(found));
}

template <typename Body>
void expect_refusal(const std::string& part, const Body& body) {
  std::string message = "nothing";
  try {
    body();
  } catch (const emu::Error& error) {
    message = error.what();
  }
  if (message.find(part) == std::string::npos)
    throw std::runtime_error("expected a refusal with '" + part + "', found: " + message);
}

template <typename T>
Array<T> filled(size_t n, double scale) {
  const Both<float> values = random_values<float>(n, scale);
  Array<T> array(n, 0);
  for (size_t i = 0; i < n; ++i) array[i] = static_cast<T>(values.cpu[i]);
  return array;
}

// ---- Approximations -----------------------------------------------------------------------------

double ulp(double a) {
  int exponent;
  std::frexp(a, &exponent);
  return std::ldexp(1.0, exponent - 24);
}

struct Approximation {
  const char* name;
  double (*exact)(double);
  double (*bound)(double argument, double exact);  // half an ulp more for the rounding itself
};

constexpr auto two_ulps = [](double, double exact) { return 2.5 * ulp(exact); };
const Approximation kApproximations[] = {
    {"ex2.approx.ftz", [](double a) { return std::exp2(a); }, two_ulps},
    {"ex2.approx", [](double a) { return std::exp2(a); }, two_ulps},
    {"rcp.approx.ftz", [](double a) { return 1 / a; },
     [](double, double exact) { return 1.5 * ulp(exact); }},
    {"lg2.approx", [](double a) { return std::log2(a); },
     [](double a, double exact) { return 0x1p-22 * (a > 0.5 && a < 2 ? 1 : std::fabs(exact)); }},
    {"tanh.approx", [](double a) { return std::tanh(a); },
     [](double, double exact) { return 0x1p-11 * std::fabs(exact); }},
    {"div.approx", [](double a) { return 3 / a; }, two_ulps},
};

// Within what the ISA allows; to the end of it only under a seed.
void approximations() {
  constexpr int n = 500;
  Array<float> in(n, 0), out(6 * n, 0);
  std::uniform_real_distribution<double> uniform(0.01, 9);
  for (int i = 0; i < n; ++i) in[i] = float(uniform(random_bits()));
  launch("approximate", 512, 0, in.data(), out.data(), n);
  for (int which = 0; which < 6; ++which) {
    const Approximation& one = kApproximations[which];
    double largest = 0;
    for (int i = 0; i < n; ++i) {
      const double exact = one.exact(in[i]);
      const double error = std::fabs(out[which * n + i] - exact);
      expect(error <= one.bound(in[i], exact), one.name + std::string(" is off"), error);
      largest = std::max(largest, error / ulp(exact));
    }
    if (ptx::approximation_seed == 0)
      expect(largest <= 0.5, std::string("ulps of ") + one.name, largest);
    else
      expect(largest >= 1, std::string("ulps of ") + one.name, largest);
  }
}

void special_values() {
  const float values[] = {INFINITY, -INFINITY, 0.0f, -0.0f, NAN, 3, -7, 1e-41f};
  constexpr int n = 8;
  Array<float> in(n, 0), out(6 * n, 0);
  std::copy_n(values, n, in.data());
  launch("approximate", 32, 0, in.data(), out.data(), n);
  const float expected[2][n] = {
      {INFINITY, 0, 1, 1, NAN, 8, 0x1p-7f, 1},
      {0, -0.0f, INFINITY, -INFINITY, NAN, out[2 * n + 5], out[2 * n + 6], INFINITY}};
  for (int i = 0; i < n; ++i)
    for (const int which : {0, 1}) {
      const float found = out[(which == 0 ? 0 : 2) * n + i], wanted = expected[which][i];
      expect(std::isnan(wanted) ? std::isnan(found)
                                : found == wanted && std::signbit(found) == std::signbit(wanted),
             (which == 0 ? "ex2 of " : "rcp of ") + std::to_string(values[i]), found);
    }
}

// The lower halves of argument and result do not count.
void approximate_reciprocals_of_doubles() {
  constexpr int n = 100;
  Array<double> in(n, 0), out(n, 0);
  std::uniform_real_distribution<double> uniform(0.01, 9);
  for (int i = 0; i < n; ++i) in[i] = uniform(random_bits());
  launch("approximate_in_double", 128, 0, in.data(), out.data(), n);
  double largest = 0;
  for (int i = 0; i < n; ++i) {
    expect(std::bit_cast<uint64_t>(out[i]) % (uint64_t(1) << 32) == 0, "lower half of", out[i]);
    largest = std::max(largest, std::fabs(out[i] * in[i] - 1));
  }
  expect(largest < 0x1p-18, "relative error", largest);
  expect(largest > 0x1p-23, "relative error", largest);
}

// ---- Matrices -----------------------------------------------------------------------------------

template <typename T>
using Widen = float (*)(T);

// d = a b + c within what `rounds` roundings of single precision allow.
template <typename T, typename... More>
void check_product(const char* kernel, int K, Widen<T> widen, uint16_t (*narrow)(float),
                   More... more) {
  const auto random = [&](size_t n) {
    Array<T> array(n, 0);
    const Array<float> values = filled<float>(n, 2);
    for (size_t i = 0; i < n; ++i) {
      if constexpr (std::is_same_v<T, uint16_t>)
        array[i] = narrow(values[i]);
      else
        array[i] = values[i];
    }
    return array;
  };
  const Array<T> a = random(16 * K), b = random(8 * K);
  const Array<float> c = filled<float>(16 * 8, 2), d = filled<float>(16 * 8, 0);
  launch(kernel, 32, 0, a.data(), b.data(), c.data(), d.data(), more...);
  bool rounded = false;
  for (int row = 0; row < 16; ++row)
    for (int column = 0; column < 8; ++column) {
      double sum = c[8 * row + column], size = std::fabs(sum);
      for (int k = 0; k < K; ++k) {
        const double product = double(widen(a[K * row + k])) * widen(b[K * column + k]);
        sum += product, size += std::fabs(product);
      }
      const double found = d[8 * row + column];
      expect(std::fabs(found - sum) <= K * size * 0x1p-23, std::string(kernel) + " gives", found);
      rounded |= float(sum) != d[8 * row + column];
    }
  expect(rounded == (ptx::approximation_seed != 0), "sums differ from exact ones", rounded);
}

void products() {
  check_product<uint16_t>("multiply_half", 16, ptx::from_half, ptx::to_half);
  check_product<uint16_t>("multiply_bfloat16", 16, ptx::from_bfloat16, ptx::to_bfloat16);
  check_product<uint16_t>("multiply_short", 8, ptx::from_half, ptx::to_half, 1);
  check_product<uint16_t>("multiply_short", 8, ptx::from_bfloat16, ptx::to_bfloat16, 0);
  const Widen<float> tf32 = [](float a) {
    return std::bit_cast<float>((std::bit_cast<uint32_t>(a) + 0x1000u) & 0xffffe000u);
  };
  check_product<float>("multiply_tf32", 8, tf32, nullptr);
}

void transposition() {
  Array<uint16_t> in(4 * 64, 0), out(7 * 64, 0);
  for (int i = 0; i < 4 * 64; ++i) in[i] = uint16_t(i);
  launch("transpose", 32, 0, in.data(), out.data());
  const int matrices[] = {0, 0, 1, 0, 1, 2, 3};
  for (int k = 0; k < 7; ++k)
    for (int i = 0; i < 64; ++i)
      expect(out[64 * k + i] == in[64 * matrices[k] + 8 * (i % 8) + i / 8], "element", out[i]);
}

// Of 16 bytes, `count` are copied and the rest are zeros.
void partial_copies() {
  Array<float> in(128, 0), out(128, 0);
  for (int i = 0; i < 128; ++i) in[i] = float(i + 1);
  for (const int count : {0, 4, 12, 16}) {
    launch("copy_partly", 32, 0, in.data(), out.data(), count);
    for (int i = 0; i < 128; ++i)
      expect(out[i] == (4 * (i % 4) < count ? in[i] : 0), "element", out[i]);
  }
  expect_refusal("copies more than it has room for",
                 [&] { launch("copy_partly", 32, 0, in.data(), out.data(), 17); });
}

// ---- Refusals -----------------------------------------------------------------------------------

void refusals() {
  const Array<float> in = filled<float>(128, 1), out = filled<float>(128, 1);
  const auto run = [&](const char* kernel, unsigned threads = 32) {
    launch(kernel, threads, 0, in.data(), out.data());
  };
  expect_refusal("that an asynchronous copy has yet to write", [&] { run("copy_not_awaited"); });
  expect_refusal("nothing orders the two", [&] { run("copy_without_barrier"); });
  expect_refusal("nothing orders the two", [&] { run("copy_into_what_is_read"); });
  expect_refusal("the row starts at a misaligned address", [&] { run("misaligned_row"); });
  expect_refusal("lanes 0000ffff are in line", [&] { run("matrix_without_half_a_warp"); });
  expect_refusal("nothing orders the two", [&] { run("matrix_read_without_sync"); });
  expect_refusal("65 threads and compiled for 64", [&] { run("for_64_threads", 65); });
  expect_refusal("has another number of parameters",
                 [&] { launch("for_64_threads", 1, 0, in.data()); });
  expect_refusal("has 8 bytes in PTX and 4", [&] { launch("for_64_threads", 1, 0, 1, 2); });
  expect_refusal("no kernel nowhere", [&] { run("nowhere"); });
  const Array<int> zero = one(0);
  expect_refusal("integer division by zero",
                 [&] { launch("divides_by_zero", 1, 0, zero.data(), zero.data()); });
  int on_the_host = 1;
  expect_refusal("of global memory outside of all memory",
                 [&] { launch("divides_by_zero", 1, 0, &on_the_host, zero.data()); });
}

// ---- Counts -------------------------------------------------------------------------------------

void strided(int stride) {
  const Array<float> in = filled<float>(32 * stride, 1), out = filled<float>(32, 1);
  launch("strided", 32, 0, in.data(), out.data(), stride);
}

void shared_strided(int stride) {
  const Array<float> out = filled<float>(32, 1);
  launch("shared_strided", 32, 32 * stride * sizeof(float), out.data(), stride);
}

void wide(int stride) {
  const Array<float> in = filled<float>(4 * 32 * stride, 1), out = filled<float>(4 * 32, 1);
  launch("wide", 32, 0, in.data(), out.data(), stride);
}

void half_idle() {
  const Array<float> out = filled<float>(32, 1);
  launch("half_idle", 32, 0, out.data(), 1000);
}

// Run one at a time by tests/test_ptx.py, which reads what has been counted.
const Register kChecks[] = {
    {"approximations", approximations},
    {"special_values", special_values},
    {"approximate_reciprocals_of_doubles", approximate_reciprocals_of_doubles},
    {"products", products},
    {"transposition", transposition},
    {"partial_copies", partial_copies},
    {"refusals", refusals},
    {"strided_1", [] { strided(1); }},
    {"strided_2", [] { strided(2); }},
    {"strided_8", [] { strided(8); }},
    {"shared_strided_1", [] { shared_strided(1); }},
    {"shared_strided_2", [] { shared_strided(2); }},
    {"shared_strided_32", [] { shared_strided(32); }},
    {"wide_1", [] { wide(1); }},
    {"wide_2", [] { wide(2); }},
    {"half_idle", half_idle},
};

}  // namespace
}  // namespace checks
