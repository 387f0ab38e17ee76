// Approximate instructions: anything within the error that the PTX ISA allows may come out. Seed 0
// gives the value nearest to the exact one; any other seed picks, for each argument anew, a value
// somewhere within the bound, often at its very end.
#pragma once

#include <cstdint>

namespace ptx {

extern uint64_t approximation_seed;

// Of -1 to 1, from the seed and the bits of the argument; 0 for seed 0.
double deviation(uint64_t argument);

// At most `ulps` away from the float nearest to `exact`.
float within_ulps(double exact, int ulps, uint64_t argument);

// |result - exact| <= bound.
float within(double exact, double bound, uint64_t argument);

}  // namespace ptx
