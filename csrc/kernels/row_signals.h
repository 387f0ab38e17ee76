// The signals of one row of logits l [V]: which kinds there are, and the scalar mathematics of
// each, shared by host and device. `u = d(delta)/d(l)` is always `scale * direction`: the scalar is
// applied after the GEMM with the decoder, because for the gold signals the direction alone is also
// the cross-entropy gradient of training.
#pragma once

#include "math.h"

namespace fused_recoder {

// Asked for by switches without a default, so that a kind that is forgotten fails to compile.
enum class SignalKind : int32_t {
  kSurprisal,
  kNll,
  kEntropy,
  kRenyi,   // parameter: its order
  kSoftmax  // no signal yet, the target is not known: direction o, delta = log-sum-exp
};

struct RowSignal {
  SignalKind kind;
  double parameter = 0;  // of kinds that have one
};

// ---- Signals of one token ------------------------------------------------------------------

// Everything a gold signal derives from log p of its target: delta, `scale` (kappa: u = kappa *
// (o - onehot)) and d(kappa)/d(log p) for second derivatives. Finite for all log p in (-inf, 0].
// In double for every storage type: a scalar per row costs nothing, and an error in it would be
// common to the whole row.
struct GoldSignal {
  double delta;
  double scale;
  double scale_slope;
};

// delta = -log p
FR_HOST_DEVICE GoldSignal nll_signal(double log_p) { return GoldSignal{-log_p, 1, 0}; }

// delta = p^(-p) - 1, kappa = p^(1-p) (log p + 1)
FR_HOST_DEVICE GoldSignal surprisal_signal(double log_p) {
  const double p = exp(log_p);
  // p * log p would be 0 * -inf for impossible targets; the limits are 0. (NaN is not 0.)
  if (p == 0) return GoldSignal{0, 0, 0};
  const double one_minus_p = -expm1(log_p);
  const double power = exp(one_minus_p * log_p);
  return GoldSignal{expm1(-p * log_p), power * (log_p + 1),
                    power * ((one_minus_p - p * log_p) * (log_p + 1) + 1)};
}

FR_HOST_DEVICE GoldSignal gold_signal(SignalKind kind, double log_p) {
  switch (kind) {
    case SignalKind::kNll:
      return nll_signal(log_p);
    case SignalKind::kSurprisal:
      return surprisal_signal(log_p);
    case SignalKind::kEntropy:
    case SignalKind::kRenyi:
    case SignalKind::kSoftmax:
      break;  // of no token
  }
  return GoldSignal{NAN, NAN, NAN};
}

// ---- Sums over a row -----------------------------------------------------------------------
//
// A pass over a row collects Z = sum of e_j and, if kSums is 2, T = sum of t(x_j): e_j = exp(x_j),
// x_j = l_j minus the largest logit so far. A signal of the whole prediction is a function of both,
// and says
//   rise     how they change when the maximum rises,
//   summand  what t is,
//   delta    of Z and mean = T / Z,
//   row      what the elements of a row have in common: with it, `along` and `cotangent`,
//   dot      <u, v> from <o, v> and the sum of t(x_j) v_j / Z,
//   share    what a part of W adds to dh = sum of u_j W_j, from its sums of e_j W_j and t(x_j) W_j.
// V is a number or a vector of numbers, `math` the elementary functions of V, of a type that each
// device brings.

// One word. y is log o up to a constant of the row, its `origin`: y = x - origin.
template <typename V>
struct Word {
  V x, y, o;
};

// t(x) in two factors: sums multiply and add at once.
template <typename V>
struct Summand {
  V weight, value;
};

// The sum of exponentials alone.
struct OneSum {
  static constexpr int kSums = 1;

  template <typename T>
  struct Rise {
    T factor;  // of Z
  };
  template <typename T, typename Math>
  FR_HOST_DEVICE Rise<T> rise(T shift, const Math& math) const {
    return {math.exp(shift)};
  }

  template <typename T>
  struct Share {
    T factor;
    template <typename V>
    FR_HOST_DEVICE V add(V dh, V e_w, V) const {
      return dh + factor * e_w;
    }
    FR_HOST_DEVICE bool is_empty() const { return factor == T(0); }
  };
  template <typename T>
  FR_HOST_DEVICE Share<T> share(const Rise<double>& rise, double sum, double) const {
    return {T(T(rise.factor) / sum)};
  }
};

// nll and surprisal, and the softmax before its target is known.
struct OneToken : OneSum {
  SignalKind kind;
  FR_HOST_DEVICE explicit OneToken(SignalKind kind) : kind(kind) {}
  FR_HOST_DEVICE bool is_open() const { return kind == SignalKind::kSoftmax; }
};

// H = log Z - T / Z with t(x) = exp(x) x; u_j = -o_j (log o_j + H).
struct Entropy {
  static constexpr int kSums = 2;

  template <typename T>
  struct Rise {
    T factor, shift;
    template <typename V>
    FR_HOST_DEVICE V second(V t, V z) const {
      return factor * (t + shift * z);
    }
  };
  template <typename T, typename Math>
  FR_HOST_DEVICE Rise<T> rise(T shift, const Math& math) const {
    return {math.exp(shift), shift};
  }

  template <typename V, typename Math>
  FR_HOST_DEVICE Summand<V> summand(V x, V e, const Math&) const {
    return {e, x};
  }

  FR_HOST_DEVICE double delta(double sum, double mean) const { return log(sum) - mean; }

  template <typename T>
  struct Row {
    T mean;  // <o, y> = -H - log Z - origin
    // by * u_j
    template <typename V, typename Math>
    FR_HOST_DEVICE V along(const Word<V>& word, V by, const Math&) const {
      return -(word.o * by) * (word.y - mean);
    }
    // (Hessian of delta) v + delta_bar u, with `centred` = v_j - <o, v> and `dot` = <u, v>
    template <typename V>
    FR_HOST_DEVICE V cotangent(V u, V o, V centred, T dot, T delta_bar) const {
      return centred * (u - o) - o * dot + delta_bar * u;
    }
  };
  template <typename T>
  FR_HOST_DEVICE Row<T> row(double, double mean, double origin) const {
    return {T(mean - origin)};
  }

  FR_HOST_DEVICE double dot(double mean, double mean_bar, double summand_bar) const {
    return mean * mean_bar - summand_bar;
  }

  // dh = -(E[x W] - E[x] E[W])
  template <typename T>
  struct Share {
    T factor, offset;
    template <typename V>
    FR_HOST_DEVICE V add(V dh, V e_w, V t_w) const {
      return dh - factor * (t_w + offset * e_w);
    }
    FR_HOST_DEVICE bool is_empty() const { return factor == T(0); }
  };
  template <typename T>
  FR_HOST_DEVICE Share<T> share(const Rise<double>& rise, double sum, double mean) const {
    return {T(T(rise.factor) / sum), T(T(rise.shift) - mean)};
  }
};

// H_q = log(sum of o_j^q) / (1 - q) of order q, not 1; u = q/(1-q) (r - o) with r = softmax(q l).
//
// With P = sum of exp(q x_j) and a = q - 1, H_q = log Z - log(P / Z) / a and u_j = -q/a (exp(q x_j)
// / P - e_j / Z). Of an order near 1 both are small differences divided by a small number, so there
// t(x) is the quotient itself, (exp(q x) - exp(x)) / a, and P = Z + a T. Elsewhere t(x) = exp(q x).
struct Renyi {
  static constexpr int kSums = 2;
  double order, excess, inverse;  // q, a, 1/a
  bool is_near;
  FR_HOST_DEVICE explicit Renyi(double order)
      : order(order),
        excess(order - 1),
        inverse(1 / excess),
        is_near(excess > -0.25 && excess < 0.25) {}

  template <typename T>
  struct Term {
    T order, half_excess, inverse;
    bool is_near;
    // exp(q x) - exp(x) = (exp(q x) + exp(x)) tanh(a x / 2)
    template <typename V, typename Math>
    FR_HOST_DEVICE Summand<V> operator()(V x, V e, const Math& math) const {
      const V power = math.exp(order * x);
      if (!is_near) return {power, V{} + T(1)};
      return {power + e, math.tanh(half_excess * x) * inverse};
    }
  };
  template <typename T>
  FR_HOST_DEVICE Term<T> term() const {
    return {T(order), T(excess / 2), T(inverse), is_near};
  }

  template <typename T>
  struct Rise {
    T factor, power, offset;
    template <typename V>
    FR_HOST_DEVICE V second(V t, V z) const {
      return power * t + offset * z;
    }
  };
  template <typename T, typename Math>
  FR_HOST_DEVICE Rise<T> rise(T shift, const Math& math) const {
    const T factor = math.exp(shift), power = math.exp(T(order) * shift);
    if (!is_near) return {factor, power, T(0)};
    return {factor, power, (power + factor) * math.tanh(T(excess / 2) * shift) * T(inverse)};
  }

  template <typename V, typename Math>
  FR_HOST_DEVICE Summand<V> summand(V x, V e, const Math& math) const {
    return term<typename Math::Number>()(x, e, math);
  }

  FR_HOST_DEVICE double delta(double sum, double mean) const {
    return log(sum) - (is_near ? log1p(excess * mean) : log(mean)) * inverse;
  }

  // u_j = of_t t(x_j) / Z + of_o o_j
  struct Direction {
    double of_t, of_o;
  };
  FR_HOST_DEVICE Direction direction(double mean) const {
    if (!is_near) return {-order * inverse / mean, order * inverse};
    const double scale = order / (1 + excess * mean);  // q Z / P
    return {-scale, scale * mean};
  }

  template <typename T>
  struct Row {
    Term<T> term;
    T sum, of_t, of_o, excess;
    template <typename V, typename Math>
    FR_HOST_DEVICE V along(const Word<V>& word, V by, const Math& math) const {
      const Summand<V> t = term(word.x, word.o * sum, math);
      return (of_t * t.weight * t.value + of_o * word.o) * by;
    }
    // The entropy's is the limit: q = 1, a = 0.
    template <typename V>
    FR_HOST_DEVICE V cotangent(V u, V o, V centred, T dot, T delta_bar) const {
      return term.order * (centred * (u - o) - o * dot) + (excess * dot + delta_bar) * u;
    }
  };
  template <typename T>
  FR_HOST_DEVICE Row<T> row(double sum, double mean, double) const {
    const Direction u = direction(mean);
    return {term<T>(), T(sum), T(u.of_t / sum), T(u.of_o), T(excess)};
  }

  FR_HOST_DEVICE double dot(double mean, double mean_bar, double summand_bar) const {
    const Direction u = direction(mean);
    return u.of_t * summand_bar + u.of_o * mean_bar;
  }

  template <typename T>
  struct Share {
    T of_e, of_t;
    template <typename V>
    FR_HOST_DEVICE V add(V dh, V e_w, V t_w) const {
      return dh + of_e * e_w + of_t * t_w;
    }
    FR_HOST_DEVICE bool is_empty() const { return of_e == T(0) && of_t == T(0); }
  };
  template <typename T>
  FR_HOST_DEVICE Share<T> share(const Rise<double>& rise, double sum, double mean) const {
    const Direction u = direction(mean);
    return {T((u.of_t * rise.offset + u.of_o * rise.factor) / sum), T(u.of_t * rise.power / sum)};
  }
};

// Calls body(OneToken, or what the signal is of the whole prediction).
template <typename Body>
FR_HOST void with_row_signal(const RowSignal& signal, const Body& body) {
  switch (signal.kind) {
    case SignalKind::kNll:
    case SignalKind::kSurprisal:
    case SignalKind::kSoftmax:
      return body(OneToken(signal.kind));
    case SignalKind::kEntropy:
      return body(Entropy());
    case SignalKind::kRenyi:
      return signal.parameter == 1 ? body(Entropy()) : body(Renyi(signal.parameter));
  }
}

}  // namespace fused_recoder
