// Cross-entropy and its gradient from logits that come in tiles of the vocabulary and never stand whole. The BLAS makes
// a tile of logits and multiplies what becomes of it; these kernels are what lies between. The reference is xent in
// rrd/ops/reference.py.
//
//     first over all tiles   fold: running maximum, sum of exp(l - maximum), the target's logit
//     then                   loss = maximum - target's logit + log(sum)
//     then over all tiles    grad: l becomes scale (softmax - one-hot)
//
// Shapes   logits [n, width] fp32, rows ld elements apart, columns are the words first ... first + width; targets [n]
//          int64; top, sum, hit, losses [n] fp32; total [1] fp32. A negative target means no label: no loss, no gradient.
// Writes   fold overwrites top, sum and hit where begin is 1, else takes the tile into them; logits stay. loss
//          overwrites losses and ADDS to total. grad overwrites logits.
// Null     losses.
// Exact    fp32; a row's sum is taken in one fixed order, 256 parts, then the parts. No atomics: the same input gives
//          the same bits. A NaN among the logits, or an infinity, makes its row's loss NaN. -inf is a word that cannot be.

#ifndef __CUDACC__
#include "host.h"
#endif

constexpr int WARPS = 8;

__device__ __forceinline__ float minus_infinity() { return -1.f / 0.f; }

// The maximum or the sum of x over the block, to every thread. parts is used once.
template <bool SUM> __device__ __forceinline__ float over_block(float x, float* parts) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, x, lanes);
    x = SUM ? x + other : fmaxf(x, other);
  }
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  x = parts[0];
#pragma unroll
  for (int i = 1; i < WARPS; i++) x = SUM ? x + parts[i] : fmaxf(x, parts[i]);
  return x;
}

// Grid (n): a block has a row.
extern "C" __global__ void __launch_bounds__(256) rrd_xent_fold(
    const float* logits, const long long* targets, float* top, float* sum, float* hit, int n, int width, long long ld,
    long long first, int begin) {
  __shared__ float tops[WARPS], sums[WARPS];
  const int row = blockIdx.x;
  const float* l = logits + row * ld;
  const float before = begin ? minus_infinity() : top[row];
  float most = before;
  for (int i = threadIdx.x; i < width; i += 256) most = fmaxf(most, l[i]);
  most = over_block<false>(most, tops);
  const float base = most == minus_infinity() ? 0.f : most;  // -inf less itself is no number
  float part = 0.f;
  for (int i = threadIdx.x; i < width; i += 256) part += expf(l[i] - base);
  part = over_block<true>(part, sums);
  if (threadIdx.x == 0) {
    const long long target = targets[row] - first;
    const bool here = target >= 0 && target < width;
    sum[row] = part + (begin ? 0.f : sum[row] * expf(before - base));
    top[row] = most;
    if (here) hit[row] = l[target];
    else if (begin) hit[row] = 0.f;
  }
}

// Grid (1).
extern "C" __global__ void __launch_bounds__(256) rrd_xent_loss(
    const float* top, const float* sum, const float* hit, const long long* targets, float* losses, float* total, int n) {
  __shared__ float parts[WARPS];
  float mine = 0.f;
  for (int row = threadIdx.x; row < n; row += 256) {
    const float loss = targets[row] < 0 ? 0.f : (top[row] - hit[row]) + logf(sum[row]);
    if (losses) losses[row] = loss;
    mine += loss;
  }
  mine = over_block<true>(mine, parts);
  if (threadIdx.x == 0) total[0] += mine;
}

// Grid (n, ceil(width / 1024)).
extern "C" __global__ void __launch_bounds__(256) rrd_xent_grad(
    float* logits, const long long* targets, const float* top, const float* sum, int n, int width, long long ld,
    long long first, float scale) {
  const int row = blockIdx.x;
  float* l = logits + row * ld;
  const long long target = targets[row] - first;
  const bool labelled = targets[row] >= 0;
  const float most = top[row], whole = sum[row];
#pragma unroll
  for (int part = 0; part < 4; part++) {
    const int i = blockIdx.y * 1024 + part * 256 + threadIdx.x;
    if (i < width) l[i] = labelled ? (expf(l[i] - most) / whole - (i == target ? 1.f : 0.f)) * scale : 0.f;
  }
}
