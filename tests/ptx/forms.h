// The forms of opcodes that are known, by name. Families define them; nothing else is executed.
#pragma once

#include <tuple>
#include <utility>

#include "kernel.h"
#include "lanes.h"
#include "warp.h"

namespace ptx {

// Forms of one name differ in the widths of their operands.
std::vector<const Form*> forms_named(const std::string& name);
const std::vector<const Form*>& all_forms();
void define(Form form);

// One operation per lane: results in registers of type D, operands in registers of types S.
template <typename Op, typename D, typename... S>
struct LaneWise {
  static void execute(Warp& warp, const Instruction& at, uint32_t lanes) {
    run(warp, at, lanes, std::index_sequence_for<S...>());
  }

 private:
  template <size_t... I>
  static void run(Warp& warp, const Instruction& at, uint32_t lanes, std::index_sequence<I...>) {
    D* const to = warp.lanes<D>(at.operand[0]);
    warp.set_undefined(at.operand[0], lanes, (warp.undefined(at.operand[I + 1]) | ...));
    const std::tuple<const S*...> from{warp.lanes<const S>(at.operand[I + 1])...};
    if (lanes == kAllLanes) {
#pragma GCC ivdep
      for (int lane = 0; lane < kLanes; ++lane) to[lane] = Op()(std::get<I>(from)[lane]...);
    } else {
      for_lanes(lanes, [&](int lane) { to[lane] = Op()(std::get<I>(from)[lane]...); });
    }
  }
};

template <typename Signature>
struct Defined;
template <typename D, typename... S>
struct Defined<D(S...)> {
  template <typename Op>
  static void as(const std::string& name, Op) {
    define({name, {sizeof(D), sizeof(S)...}, 1, LaneWise<Op, D, S...>::execute});
  }
};

// define<float(float, float)>("add.f32", [](auto a, auto b) { return a + b; })
template <typename Signature, typename Op>
void define(const std::string& name, Op op) {
  Defined<Signature>::as(name, op);
}

void define_arithmetic();
void define_bits();
void define_comparisons();
void define_conversions();
void define_approximations();
void define_memory();
void define_control();
void define_warp();
void define_matrices();
void define_async_copies();

}  // namespace ptx
