// The kernels of the shim's own tests, for nvcc.
#include "bugs.cuh"
#include "patterns.cuh"

template __global__ void last_block_sums<true>(const float*, float*);
template __global__ void last_block_sums<false>(const float*, float*);
