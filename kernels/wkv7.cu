// RWKV-7's recurrence (Peng et al., 2025), forward and backward, for heads of 64 channels. The reference is wkv7 in
// rrd/ops/reference.py:
//
//     u = S a;   S <- S diag(d) + u b^T + v k^T;   y = S r          d = exp(log_d);  S has rows of values, columns of keys
//
// Shapes   r, log_d, k, v, a, b, y, u and their gradients [B, T, H, 64]; states [B, H, 64, 64]; all fp32, contiguous.
//          kept [B, H, ceil(T/16), 64, 64]: the states before tokens 0, 16, 32, … Any T >= 0.
// Grid     (H, B): a block has a head. Forward: a thread has a row of S. Backward: two threads share column j of S and
//          of its gradient D, and row j of D, 32 elements each, in registers (64 threads would need 255 and spill).
// Writes   Everything it gives is overwritten, nothing is added to. No atomics: the same input gives the same bits.
// Null     state and dlast (zeros); u and kept in forward (no gradient is wanted).
// Exact    Forward is fp32, token by token. Backward runs forward from a kept state through its 16 tokens and divides
//          the decay out again, over at most 8 of them, where d = 0.545 at every token costs a factor of 128 in the
//          rounding (over 16 it would be 16,000). Wants log_d >= -1.

#ifndef __CUDACC__
#include "host.h"
#endif

constexpr int N = 64;       // channels of a head
constexpr int CHUNK = 16;   // tokens between kept states
constexpr int HALF = N / 2;

// Vectors of 64 in shared memory with a gap of 4, so that the two halves are in different banks.
constexpr int ROOM = N + 4;
__device__ __forceinline__ int place(int i) { return i + i / HALF * 4; }

__device__ __forceinline__ float4 load4(const float* p) { return *reinterpret_cast<const float4*>(p); }
__device__ __forceinline__ void store4(float* p, float4 v) { *reinterpret_cast<float4*>(p) = v; }

// ---- forward ---------------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(64, 4) rrd_wkv7_forward(
    const float* r, const float* log_d, const float* k, const float* v, const float* a, const float* b,
    const float* state, float* y, float* u, float* kept, float* last, int T, int H) {
  const int i = threadIdx.x;
  const long long head = (long long)blockIdx.y * H + blockIdx.x;
  const long long chunks = (T + CHUNK - 1) / CHUNK;
  __shared__ __align__(16) float given[2][5][N];  // r, d, k, a, b of this token, and of the next

  float S[N];
#pragma unroll
  for (int j = 0; j < N; j += 4) {
    float4 s = {0.f, 0.f, 0.f, 0.f};
    if (state) s = load4(state + (head * N + i) * N + j);
    S[j] = s.x, S[j + 1] = s.y, S[j + 2] = s.z, S[j + 3] = s.w;
  }
  for (int t = 0; t < T; t++) {
    if (kept && t % CHUNK == 0) {
      float* to = kept + ((head * chunks + t / CHUNK) * N + i) * N;
#pragma unroll
      for (int j = 0; j < N; j += 4) store4(to + j, float4{S[j], S[j + 1], S[j + 2], S[j + 3]});
    }
    const long long at = (((long long)blockIdx.y * T + t) * H + blockIdx.x) * N + i;
    float(*now)[N] = given[t & 1];  // the other one may still be read by threads behind
    now[0][i] = r[at], now[1][i] = expf(log_d[at]), now[2][i] = k[at], now[3][i] = a[at], now[4][i] = b[at];
    const float vi = v[at];
    __syncthreads();

    float4 sum = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int j = 0; j < N; j += 4) {
      const float4 aj = load4(now[3] + j);
      sum.x += S[j] * aj.x, sum.y += S[j + 1] * aj.y, sum.z += S[j + 2] * aj.z, sum.w += S[j + 3] * aj.w;
    }
    const float ui = (sum.x + sum.y) + (sum.z + sum.w);
    sum = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int j = 0; j < N; j += 4) {
      const float4 rj = load4(now[0] + j), dj = load4(now[1] + j), kj = load4(now[2] + j), bj = load4(now[4] + j);
      S[j] = S[j] * dj.x + ui * bj.x + vi * kj.x;
      S[j + 1] = S[j + 1] * dj.y + ui * bj.y + vi * kj.y;
      S[j + 2] = S[j + 2] * dj.z + ui * bj.z + vi * kj.z;
      S[j + 3] = S[j + 3] * dj.w + ui * bj.w + vi * kj.w;
      sum.x += S[j] * rj.x, sum.y += S[j + 1] * rj.y, sum.z += S[j + 2] * rj.z, sum.w += S[j + 3] * rj.w;
    }
    y[at] = (sum.x + sum.y) + (sum.z + sum.w);
    if (u) u[at] = ui;
  }
#pragma unroll
  for (int j = 0; j < N; j += 4)
    store4(last + (head * N + i) * N + j, float4{S[j], S[j + 1], S[j + 2], S[j + 3]});
}

// ---- backward --------------------------------------------------------------------------------------------------------

enum Vector { R, D, K, V, A, B, U, DY, INVERSE, VECTORS };  // of a token; D is exp(log_d), INVERSE exp(-log_d)

struct Inputs {
  const float *r, *log_d, *k, *v, *a, *b, *u, *dy;
};

// A token's vectors to shared memory: each thread of the 128 brings half of them for one channel.
__device__ __forceinline__ void bring(float (*to)[ROOM], const Inputs& in, long long token, int tid) {
  const int c = tid % N, p = place(c);
  const long long at = token * N + c;
  if (tid < N) {
    const float log_d = in.log_d[at];
    to[D][p] = expf(log_d), to[INVERSE][p] = expf(-log_d), to[K][p] = in.k[at], to[V][p] = in.v[at];
  } else {
    to[R][p] = in.r[at], to[A][p] = in.a[at], to[B][p] = in.b[at], to[U][p] = in.u[at], to[DY][p] = in.dy[at];
  }
}

__device__ __forceinline__ float both_halves(float x) { return x + __shfl_xor_sync(0xffffffffu, x, 1); }

extern "C" __global__ void __launch_bounds__(128) rrd_wkv7_backward(
    const float* r, const float* log_d, const float* k, const float* v, const float* a, const float* b,
    const float* u, const float* kept, const float* dy, const float* dlast,
    float* dr, float* dlog_d, float* dk, float* dv, float* da, float* db, float* dfirst, int T, int H) {
  const int tid = threadIdx.x, j = tid / 2, half = tid % 2, base = half * HALF;
  const int pj = place(j), pbase = place(base);  // j's own element; the first of the 32 others
  const long long head = (long long)blockIdx.y * H + blockIdx.x;
  const int chunks = (T + CHUNK - 1) / CHUNK;
  const Inputs in = {r, log_d, k, v, a, b, u, dy};
  __shared__ __align__(16) float given[2][VECTORS][ROOM];  // of this token, and of the one before
  __shared__ __align__(16) float du[ROOM];
  __shared__ float middle[HALF][128];  // the state after 8 tokens of the chunk; a thread reads only what it wrote

  float S[HALF];   // S[n] is the state at (base + n, j)
  float G[HALF];   // its gradient, there
  float Gr[HALF];  // and at (j, base + n)
#pragma unroll
  for (int n = 0; n < HALF; n++) {
    G[n] = dlast ? dlast[(head * N + base + n) * N + j] : 0.f;
    Gr[n] = dlast ? dlast[(head * N + j) * N + base + n] : 0.f;
  }
  int turn = 0;  // of given: what is brought next goes to the other half, which nobody reads any more
  for (int c = chunks - 1; c >= 0; c--) {
    const float* from = kept + (head * chunks + c) * N * N;
#pragma unroll
    for (int n = 0; n < HALF; n++) S[n] = from[(base + n) * N + j];
    const int count = min(CHUNK, T - c * CHUNK);
    const long long first = ((long long)blockIdx.y * T + (long long)c * CHUNK) * H + blockIdx.x;

    for (int s = 0; s < count; s++) {  // forward again
      float(*x)[ROOM] = given[turn];
      turn ^= 1;
      bring(x, in, first + (long long)s * H, tid);
      __syncthreads();
      if (s == CHUNK / 2) {
#pragma unroll
        for (int n = 0; n < HALF; n++) middle[n][tid] = S[n];
      }
      const float dj = x[D][pj], kj = x[K][pj], bj = x[B][pj];
#pragma unroll
      for (int n = 0; n < HALF; n += 4) {
        const float4 ui = load4(x[U] + pbase + n), vi = load4(x[V] + pbase + n);
        S[n] = S[n] * dj + ui.x * bj + vi.x * kj;
        S[n + 1] = S[n + 1] * dj + ui.y * bj + vi.y * kj;
        S[n + 2] = S[n + 2] * dj + ui.z * bj + vi.z * kj;
        S[n + 3] = S[n + 3] * dj + ui.w * bj + vi.w * kj;
      }
    }
    for (int s = count - 1; s >= 0; s--) {  // and back; S is the state after token s
      float(*x)[ROOM] = given[turn];
      turn ^= 1;
      const long long at = (first + (long long)s * H) * N + j;
      bring(x, in, first + (long long)s * H, tid);
      __syncthreads();
      if (s == CHUNK / 2 - 1 && count > CHUNK / 2) {
#pragma unroll
        for (int n = 0; n < HALF; n++) S[n] = middle[n][tid];
      }
      // Rows of the gradient: of v and of u.
      const float dyj = x[DY][pj];
      float dvj = 0.f, duj = 0.f;
#pragma unroll
      for (int n = 0; n < HALF; n += 4) {
        const float4 ri = load4(x[R] + pbase + n), ki = load4(x[K] + pbase + n), bi = load4(x[B] + pbase + n);
        Gr[n] += dyj * ri.x, Gr[n + 1] += dyj * ri.y, Gr[n + 2] += dyj * ri.z, Gr[n + 3] += dyj * ri.w;
        dvj += Gr[n] * ki.x, dvj += Gr[n + 1] * ki.y, dvj += Gr[n + 2] * ki.z, dvj += Gr[n + 3] * ki.w;
        duj += Gr[n] * bi.x, duj += Gr[n + 1] * bi.y, duj += Gr[n + 2] * bi.z, duj += Gr[n + 3] * bi.w;
      }
      dvj = both_halves(dvj);
      duj = both_halves(duj);
      if (half == 0) dv[at] = dvj, du[pj] = duj;
      __syncthreads();

      // Columns: of all else, and the state before the token.
      const float rj = x[R][pj], dj = x[D][pj], kj = x[K][pj], aj = x[A][pj], bj = x[B][pj], inverse = x[INVERSE][pj];
      float drj = 0.f, dkj = 0.f, dbj = 0.f, ddj = 0.f, daj = 0.f;
      const auto element = [&](float& s, float& g, float dyi, float vi, float ui, float dui) {
        g += dyi * rj;
        drj += s * dyi, dkj += g * vi, dbj += g * ui;
        s = (s - ui * bj - vi * kj) * inverse;
        ddj += g * s, daj += s * dui;
        g = g * dj + dui * aj;
      };
#pragma unroll
      for (int n = 0; n < HALF; n += 4) {
        const float4 dyi = load4(x[DY] + pbase + n), vi = load4(x[V] + pbase + n);
        const float4 ui = load4(x[U] + pbase + n), dui = load4(du + pbase + n);
        const float4 di = load4(x[D] + pbase + n), ai = load4(x[A] + pbase + n);
        element(S[n], G[n], dyi.x, vi.x, ui.x, dui.x);
        element(S[n + 1], G[n + 1], dyi.y, vi.y, ui.y, dui.y);
        element(S[n + 2], G[n + 2], dyi.z, vi.z, ui.z, dui.z);
        element(S[n + 3], G[n + 3], dyi.w, vi.w, ui.w, dui.w);
        Gr[n] = Gr[n] * di.x + duj * ai.x, Gr[n + 1] = Gr[n + 1] * di.y + duj * ai.y;
        Gr[n + 2] = Gr[n + 2] * di.z + duj * ai.z, Gr[n + 3] = Gr[n + 3] * di.w + duj * ai.w;
      }
      drj = both_halves(drj), dkj = both_halves(dkj), dbj = both_halves(dbj);
      ddj = both_halves(ddj), daj = both_halves(daj);
      if (half == 0) dr[at] = drj, dk[at] = dkj, db[at] = dbj, dlog_d[at] = ddj * dj, da[at] = daj;
    }
  }
#pragma unroll
  for (int n = 0; n < HALF; n++) dfirst[(head * N + base + n) * N + j] = G[n];
}
