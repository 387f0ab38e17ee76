"""Upper bounds on the curvature of a signal in the top hidden state, for `steps.Lipschitz`.

If the second derivative of delta in every direction is at most L, a gradient step of length
`a <= 2/L` cannot raise it: `delta(h - a g) <= delta(h) - a (1 - a L / 2) |g|^2`. Only an upper
bound counts (strong negative curvature helps), and it has to be a bound: a power iteration
approaches the norm of W from below and would promise too much.

Take a unit vector v, and let `u = W v` be the speed of the logits, `E` and `Var` the mean and the
variance under the prediction o. `|u|^2 <= sigma^2` with sigma the spectral norm of W, and
`u_j^2 <= rho^2` with rho the largest norm of a row.

* `nll` = logsumexp(l) - l_y: the second derivative is `Var(u)`. A variance is at most a quarter of
  the squared range, and two entries of u differ by at most `sqrt(2) sigma`: `sigma^2 / 2`. It is
  also at most the mean square distance from any fixed point, such as the mean row of W:
  `R^2 = max_j |w_j - mean(w)|^2`. The smaller of both.
* `surprisal` = p^(-p) - 1 = f(n) with n = -log p: the second derivative is
  `f'(n) Var(u) + f''(n) (E(u) - u_y)^2`. With `Var(u) <= sigma^2 / 2` and
  `(E(u) - u_y)^2 <= 2 sigma^2 (1 - p)^2` its maximum over p stays below `sigma^2 / 4`.
* `entropy`, with the surprise `s_j = -log o_j` of each token: the second derivative is
  `Cov(s, (u - E u)^2) - Var(u)`. Writing the square out, `Cov(s, u^2) <= E(s u^2) <= sigma^2 / e`
  (`-o log o` is at most 1/e), and `2 |E u| |Cov(s, u)| <= sd(s) E(u^2)`, where the variance of s is
  at most `ln(V-1)^2 / 4 + 1`. We keep `sigma^2 (2/e + sqrt(ln(V-1)^2 / 4 + 1))`, which is above.
* The mean m of K predictions: the second derivative is at most
  `1/K sum_k E_k(s (u_k - E_k u_k)^2)` with `s = -log m`. As `m >= o_k / K`, `s <= -log o_k + ln K`,
  and `(a - b)^2 <= 2 a^2 + 2 b^2` gives `2 sigma^2 / e + 2 rho^2 (ln V + 2 ln K)`, averaged over
  the members of an ensemble. A variational RNN has K states that share the 1/K: K times smaller.

A dropout mask between state and decoder scales W by at most `1/(1-p)`; a mask of single weights is
bounded through the Frobenius norm.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ROUNDING = 1 + 1e-6  # of the eigenvalue computation, in float64


def spectral_norm_squared(weight: Tensor) -> Tensor:
    """sigma^2 of `[..., V, H]`, exactly: the largest eigenvalue of W^T W."""
    weight = weight.double()
    return torch.linalg.eigvalsh(weight.mT @ weight)[..., -1] * ROUNDING


def row_norm_squared(weight: Tensor) -> Tensor:
    """rho^2 of `[..., V, H]`."""
    return weight.double().square().sum(-1).amax(-1)


def nll_bound(weight: Tensor) -> Tensor:
    spread = row_norm_squared(weight.double() - weight.double().mean(-2, keepdim=True))
    return torch.minimum(spectral_norm_squared(weight) / 2, spread)


def surprisal_bound(weight: Tensor) -> Tensor:
    return spectral_norm_squared(weight) / 4


def entropy_bound(weight: Tensor, sigma_squared: Tensor | None = None) -> Tensor:
    sigma_squared = spectral_norm_squared(weight) if sigma_squared is None else sigma_squared
    spread = math.sqrt(math.log(max(weight.shape[-2] - 1, 1)) ** 2 / 4 + 1)
    return sigma_squared * (2 / math.e + spread)


def mixture_bound(weight: Tensor, samples: int, sigma_squared: Tensor | None = None) -> Tensor:
    """For weights `[V, H]` or, averaged, `[K, V, H]`."""
    if samples == 1:
        return entropy_bound(weight, sigma_squared).mean()
    sigma_squared = spectral_norm_squared(weight) if sigma_squared is None else sigma_squared
    spread = math.log(weight.shape[-2]) + 2 * math.log(samples)
    return (2 / math.e * sigma_squared + 2 * spread * row_norm_squared(weight)).mean()


def decoder_bound(rnn) -> Tensor:
    """L of the signal of `rnn` in its top state, `[]`."""
    signal, (weight, _) = rnn.signal, rnn.decoder_parameters()
    masked = 1 / (1 - signal.p) ** 2
    dropped = 1 / (1 - rnn.active_dropout[1]) ** 2
    if signal.name == "nll":
        return nll_bound(weight) * dropped
    if signal.name == "surprisal":
        return surprisal_bound(weight) * dropped
    if signal.name == "entropy":
        return entropy_bound(weight) * dropped
    if signal.name == "mc_dropout":
        if signal.p == 0:
            return entropy_bound(weight)
        frobenius = weight.double().square().sum() if signal.mask == "weight" else None
        return mixture_bound(weight, signal.samples, frobenius) * masked
    if signal.name == "ensemble":
        return mixture_bound(weight, signal.samples) * dropped
    if signal.name == "variational":
        return mixture_bound(weight, signal.samples) * masked / signal.samples
    raise ValueError(
        f"Lipschitz knows no bound for the signal {signal.name!r}: use Backtracking instead"
    )


def bounds(rnn) -> Tensor:
    """L per layer and recoded state, `[L, S]`; that of the top state stands for all."""
    shape = (rnn.num_layers, len(rnn.states))
    like = rnn.weight_hh_l0
    if rnn.signal.name == "classifier":
        result = torch.ones(shape, dtype=torch.float64, device=like.device)
        for classifier, (layer, state) in zip(rnn.signal.members, rnn.signal.places, strict=True):
            weight = classifier.weight
            if weight.shape[0] == 1:  # sigmoid(z) is the softmax of (0, z)
                weight = torch.cat([torch.zeros_like(weight), weight])
            result[layer, rnn.states.index(state)] = nll_bound(weight)
    else:
        result = decoder_bound(rnn).expand(shape)
    smallest = torch.finfo(
        torch.float32
    ).tiny  # a decoder of zeros has no curvature and no gradient
    return result.clamp_min(smallest).to(like.dtype)


def dependencies(rnn) -> tuple:
    """Changes whenever `bounds` would."""
    tensors = (
        [c.weight for c in rnn.signal.members]
        if rnn.signal.name == "classifier"
        else [rnn.decoder_parameters()[0]]
    )
    return (
        *((t.data_ptr(), t._version, t.dtype, t.device) for t in tensors),
        rnn.active_dropout,
    )
