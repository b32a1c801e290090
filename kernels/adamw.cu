// AdamW (Loshchilov and Hutter, 2019) over flat buffers: one launch for all that a job trains, and nothing read back.
// The reference is adamw in rrd/ops/reference.py; the arithmetic and its order are those of rrd/optim/adamw.py.
//
// Shapes   p, g, m, v [n] fp32: parameters, gradients and both moments in one layout. A group is a part of it that is
//          updated alike: ends [groups] int64, the first element behind each; rules [groups, 2] fp64, its learning
//          rate's factor and its weight decay.
// Writes   rrd_adamw_begin: steps [1] goes up by one; rates [groups, 2] and facts [4] are overwritten.
//          rrd_adamw_update: p, m, v in place; g stays.
// Null     norm: no clipping, and no look at whether the gradient is finite.
// Exact    Rates and bias corrections are computed in fp64 and rounded once. A norm that is NaN or infinite: the step
//          is not applied, and steps, p, m and v stay. No atomics: the same input gives the same bits.

#ifndef __CUDACC__
#include "host.h"
#endif

enum Fact { FACTOR, ROOT, APPLIED, STEP };  // the gradient's factor, sqrt(1 - beta2^t), 1 or 0, t

// Grid (1), one thread.
extern "C" __global__ void __launch_bounds__(1) rrd_adamw_begin(
    const float* norm, float clip, double lr, double beta1, double beta2, const double* rules, int groups,
    long long* steps, float* rates, float* facts) {
  const bool finite = !norm || isfinite(norm[0]);
  const long long t = finite ? ++steps[0] : steps[0];
  const double one = 1.0 - pow(beta1, (double)t), two = 1.0 - pow(beta2, (double)t);
  // In fp64, as the host would: its fp32 norm is a number of Python's there
  facts[FACTOR] = clip > 0.f && norm ? (float)fmin(1.0, clip / ((double)norm[0] + 1e-6)) : 1.f;
  facts[ROOT] = (float)sqrt(two);
  facts[APPLIED] = finite ? 1.f : 0.f;
  facts[STEP] = (float)t;
  for (int i = 0; i < groups; i++) {
    rates[2 * i] = (float)(1.0 - lr * rules[2 * i] * rules[2 * i + 1]);
    rates[2 * i + 1] = (float)(lr * rules[2 * i] / one);
  }
}

// Grid (ceil(n / 1024)): a block has 1024 elements. w1 = 1 - beta1 and w2 = 1 - beta2, rounded from fp64.
extern "C" __global__ void __launch_bounds__(256) rrd_adamw_update(
    float* p, const float* g, float* m, float* v, long long n, const long long* ends, const float* rates,
    const float* facts, float beta2, float w1, float w2, float eps) {
  if (facts[APPLIED] == 0.f) return;
  const float factor = facts[FACTOR], root = facts[ROOT];
  int group = 0;
#pragma unroll
  for (int part = 0; part < 4; part++) {
    const long long i = (long long)blockIdx.x * 1024 + part * 256 + threadIdx.x;
    if (i >= n) return;
    while (i >= ends[group]) group++;  // the last one ends at n
    const float gi = g[i] * factor;
    const float mi = m[i] + w1 * (gi - m[i]);
    const float vi = v[i] * beta2 + w2 * gi * gi;
    m[i] = mi, v[i] = vi;
    p[i] = p[i] * rates[2 * group] - rates[2 * group + 1] * (mi / (sqrtf(vi) / root + eps));
  }
}
